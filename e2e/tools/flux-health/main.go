// flux-health says what Flux concludes from objects: by kstatus alone, and by the healthCheckExprs of a
// Kustomization, in its own evaluator, as the kustomize-controller calls it.
//
//	flux-health models.yaml testdata/*.yaml
//
// prints a line for each file: its name, kstatus's verdict, that of the expressions.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "flux-health:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: flux-health KUSTOMIZATION OBJECT...")
	}
	var kustomization struct {
		Spec struct {
			HealthCheckExprs []kustomize.CustomHealthCheck `json:"healthCheckExprs"`
		} `json:"spec"`
	}
	if err := load(args[0], &kustomization); err != nil {
		return err
	}
	for _, file := range args[1:] {
		object := &unstructured.Unstructured{}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		document, err := yaml.YAMLToJSON(text)
		if err != nil {
			return err
		}
		// As the API server does it: whole numbers stay whole.
		if err := object.UnmarshalJSON(document); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		generic, err := status.Compute(object)
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		verdict, err := evaluate(kustomization.Spec.HealthCheckExprs, object)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", file, err)
			verdict = status.UnknownStatus.String() // what the controller makes of it: it waits
		}
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		fmt.Printf("%s\t%s\t%s\n", name, generic.Status, verdict)
	}
	return nil
}

func evaluate(checks []kustomize.CustomHealthCheck, object *unstructured.Unstructured) (string, error) {
	for _, check := range checks {
		if check.APIVersion != object.GetAPIVersion() || check.Kind != object.GetKind() {
			continue
		}
		evaluator, err := cel.NewStatusEvaluator(&check.HealthCheckExpressions)
		if err != nil {
			return "", err
		}
		result, err := evaluator.Evaluate(context.Background(), object)
		if err != nil {
			return "", err
		}
		return result.Status.String(), nil
	}
	return "", fmt.Errorf("no healthCheckExprs for %s", object.GroupVersionKind())
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
