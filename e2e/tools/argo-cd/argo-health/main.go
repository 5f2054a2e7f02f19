// argo-health runs a health script as Argo CD does, by Argo CD's own package, on the cases of its own
// test format.
//
//	argo-health CONFIGMAP FOLDER
//
// CONFIGMAP is argocd-cm.yaml, whose scripts are used as overrides; FOLDER holds health_test.yaml and
// the objects that it names. Prints a line for each case: the file, status, message; fails when one
// is not what the case says.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/argoproj/gitops-engine/pkg/health"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/argoproj/argo-cd/v3/util/lua"
)

const prefix = "resource.customizations.health."

// The fields of health_test.yaml, as Argo CD's own test reads them.
type cases struct {
	Tests []struct {
		InputPath    string              `json:"inputPath"`
		HealthStatus health.HealthStatus `json:"healthStatus"`
	} `json:"tests"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "argo-health:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("usage: argo-health CONFIGMAP FOLDER")
	}
	overrides, err := scripts(args[0])
	if err != nil {
		return err
	}
	var found cases
	if err := load(filepath.Join(args[1], "health_test.yaml"), &found); err != nil {
		return err
	}
	if len(found.Tests) == 0 {
		return fmt.Errorf("%s/health_test.yaml holds no tests", args[1])
	}
	wrong := 0
	for _, test := range found.Tests {
		object := &unstructured.Unstructured{}
		if err := load(filepath.Join(args[1], test.InputPath), &object.Object); err != nil {
			return err
		}
		result, err := overrides.GetResourceHealth(object)
		if err != nil {
			return fmt.Errorf("%s: %w", test.InputPath, err)
		}
		if result == nil {
			return fmt.Errorf("%s: no script for %s", test.InputPath, object.GroupVersionKind())
		}
		fmt.Printf("%s\t%s\t%s\n", test.InputPath, result.Status, result.Message)
		if *result != test.HealthStatus {
			fmt.Printf("\twanted: %s\t%s\n", test.HealthStatus.Status, test.HealthStatus.Message)
			wrong++
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%d of %d cases are wrong", wrong, len(found.Tests))
	}
	return nil
}

// scripts reads group_Kind keys of the configuration as Argo CD's settings do.
func scripts(file string) (lua.ResourceHealthOverrides, error) {
	var config struct {
		Data map[string]string `json:"data"`
	}
	if err := load(file, &config); err != nil {
		return nil, err
	}
	overrides := lua.ResourceHealthOverrides{}
	for key, script := range config.Data {
		if kind, ok := strings.CutPrefix(key, prefix); ok {
			overrides[strings.Replace(kind, "_", "/", 1)] = v1alpha1.ResourceOverride{HealthLua: script}
		}
	}
	if len(overrides) == 0 {
		return nil, fmt.Errorf("%s: no key begins with %s", file, prefix)
	}
	return overrides, nil
}

func load(file string, into any) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := yaml.Unmarshal(text, into); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}
