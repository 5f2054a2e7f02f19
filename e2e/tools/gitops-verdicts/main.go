// gitops-verdicts says what Flux and Argo CD conclude from objects: kstatus itself, and a health
// script in the Lua interpreter that Argo CD has, with the libraries that it opens.
//
//	gitops-verdicts health.lua testdata/*.yaml
//
// prints a line for each file: its name, kstatus's verdict, the script's status, its message.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gitops-verdicts:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: gitops-verdicts SCRIPT OBJECT...")
	}
	script, err := os.ReadFile(args[0])
	if err != nil {
		return err
	}
	for _, file := range args[1:] {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		object, err := read(text)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		generic, err := status.Compute(object)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		health, message, err := health(string(script), object.Object)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		fmt.Printf("%s\t%s\t%s\t%s\n", name, generic.Status, health, message)
	}
	return nil
}

// read keeps whole numbers whole, as the API server does.
func read(text []byte) (*unstructured.Unstructured, error) {
	document, err := yaml.YAMLToJSON(text)
	if err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{}
	return object, object.UnmarshalJSON(document)
}

// health runs the script with the object in the global obj; it returns a table.
func health(script string, object map[string]any) (string, string, error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
	} {
		if err := state.CallByParam(
			lua.P{Fn: state.NewFunction(open), NRet: 0, Protect: true}, lua.LString(name)); err != nil {
			return "", "", err
		}
	}
	state.SetGlobal("obj", value(state, object))
	if err := state.DoString(script); err != nil {
		return "", "", err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return "", "", fmt.Errorf("the script returned no table")
	}
	return table.RawGetString("status").String(), table.RawGetString("message").String(), nil
}

func value(state *lua.LState, from any) lua.LValue {
	switch one := from.(type) {
	case nil:
		return lua.LNil
	case bool:
		return lua.LBool(one)
	case string:
		return lua.LString(one)
	case float64:
		return lua.LNumber(one)
	case int64:
		return lua.LNumber(one)
	case []any:
		table := state.NewTable()
		for _, each := range one {
			table.Append(value(state, each))
		}
		return table
	case map[string]any:
		table := state.NewTable()
		for key, each := range one {
			table.RawSetString(key, value(state, each))
		}
		return table
	}
	panic(fmt.Sprintf("no Lua value for %T", from))
}
