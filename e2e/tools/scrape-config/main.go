// scrape-config writes the Prometheus configuration that prometheus-operator makes of PodMonitors,
// ServiceMonitors and PrometheusRules: its own generator, fed from a file instead of a cluster.
//
//	kubectl get podmonitors,prometheusrules -A -o yaml | scrape-config -rules DIR > prometheus.yml
//
// -kubeconfig says with what Prometheus, run outside the cluster, finds the pods; without it the
// configuration is for a pod's service account, as prometheus-operator writes it.
package main

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"github.com/blang/semver/v4"
	"github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus-operator/prometheus-operator/pkg/assets"
	"github.com/prometheus-operator/prometheus-operator/pkg/operator"
	"github.com/prometheus-operator/prometheus-operator/pkg/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	sigs "sigs.k8s.io/yaml"

	"github.com/prometheus/prometheus/promql/parser"
	goyaml "go.yaml.in/yaml/v2"
)

type monitors struct {
	pods     map[string]*v1.PodMonitor
	services map[string]*v1.ServiceMonitor
	rules    map[string]*v1.PrometheusRule
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how Prometheus reaches the API server")
	rules := flag.String("rules", "", "folder that the rule files are written into")
	interval := flag.String("interval", "5s", "default scrape interval and evaluation interval")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *kubeconfig, *rules, *interval); err != nil {
		fmt.Fprintln(os.Stderr, "scrape-config:", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, kubeconfig, rules, interval string) error {
	text, err := io.ReadAll(io.LimitReader(in, 64<<20))
	if err != nil {
		return err
	}
	found, err := read(text)
	if err != nil {
		return err
	}
	if len(found.pods)+len(found.services) == 0 {
		return errors.New("no PodMonitor and no ServiceMonitor among the objects read")
	}
	server := prometheusResource(interval)
	generator, err := prometheus.NewConfigGenerator(nil, server, prometheus.WithEndpointSliceSupport())
	if err != nil {
		return err
	}
	if err := refuse(generator.Version(), found); err != nil {
		return err
	}
	client := fake.NewClientset()
	store := assets.NewStoreBuilder(client.CoreV1(), client.CoreV1())
	files, err := ruleFiles(found.rules, rules)
	if err != nil {
		return err
	}
	config, err := generator.GenerateServerConfiguration(
		server, found.services, found.pods, nil, nil, store, nil, nil, nil, nil)
	if err != nil {
		return err
	}
	config, err = outside(config, kubeconfig, files)
	if err != nil {
		return err
	}
	_, err = out.Write(config)
	return err
}

// read takes YAML documents and Lists; other kinds are passed over.
func read(text []byte) (monitors, error) {
	found := monitors{
		map[string]*v1.PodMonitor{}, map[string]*v1.ServiceMonitor{}, map[string]*v1.PrometheusRule{},
	}
	for _, document := range bytes.Split(text, []byte("\n---")) {
		if err := found.add(document); err != nil {
			return found, err
		}
	}
	return found, nil
}

func (m monitors) add(document []byte) error {
	var head struct {
		metav1.TypeMeta `json:",inline"`
		Metadata        metav1.ObjectMeta      `json:"metadata"`
		Items           []runtime.RawExtension `json:"items"`
	}
	if err := sigs.Unmarshal(document, &head); err != nil {
		return err
	}
	for _, item := range head.Items {
		if err := m.add(item.Raw); err != nil {
			return err
		}
	}
	key := head.Metadata.Namespace + "/" + head.Metadata.Name
	switch head.Kind {
	case "PodMonitor":
		m.pods[key] = &v1.PodMonitor{}
		return sigs.UnmarshalStrict(document, m.pods[key])
	case "ServiceMonitor":
		m.services[key] = &v1.ServiceMonitor{}
		return sigs.UnmarshalStrict(document, m.services[key])
	case "PrometheusRule":
		m.rules[key] = &v1.PrometheusRule{}
		return sigs.UnmarshalStrict(document, m.rules[key])
	}
	return nil
}

func prometheusResource(interval string) *v1.Prometheus {
	return &v1.Prometheus{
		ObjectMeta: metav1.ObjectMeta{Name: "check", Namespace: "monitoring"},
		Spec: v1.PrometheusSpec{
			CommonPrometheusFields: v1.CommonPrometheusFields{
				ScrapeInterval:              v1.Duration(interval),
				PodMonitorSelector:          &metav1.LabelSelector{},
				ServiceMonitorSelector:      &metav1.LabelSelector{},
				PodMonitorNamespaceSelector: &metav1.LabelSelector{},
			},
			EvaluationInterval: v1.Duration(interval),
		},
	}
}

// refuse runs the operator's own checks on each rule file; generating checks the monitors.
func refuse(version semver.Version, found monitors) error {
	scheme := operator.ValidationSchemeForPrometheus(version)
	for key, rule := range found.rules {
		errs := operator.ValidateRule(rule.Spec, scheme, parser.Options{})
		if len(errs) > 0 {
			return fmt.Errorf("PrometheusRule %s: %w", key, errors.Join(errs...))
		}
	}
	return nil
}

func ruleFiles(rules map[string]*v1.PrometheusRule, folder string) ([]string, error) {
	if folder == "" {
		return nil, nil
	}
	var files []string
	for _, rule := range rules {
		text, err := sigs.Marshal(rule.Spec)
		if err != nil {
			return nil, err
		}
		file := filepath.Join(folder, rule.Namespace+"-"+rule.Name+".yaml")
		if err := os.WriteFile(file, text, 0o644); err != nil {
			return nil, err
		}
		files = append(files, file)
	}
	sort.Strings(files)
	return files, nil
}

// outside does for a Prometheus outside the cluster what a pod's sidecar does: it fills in the pod's
// name and shard, and says where the rules and the way to the API server are.
func outside(config []byte, kubeconfig string, files []string) ([]byte, error) {
	filled := strings.NewReplacer("$(POD_NAME)", "check", "$(SHARD)", "0").Replace(string(config))
	var top goyaml.MapSlice
	if err := goyaml.Unmarshal([]byte(filled), &top); err != nil {
		return nil, err
	}
	kept := goyaml.MapSlice{}
	for _, item := range top {
		if item.Key == "scrape_configs" {
			for _, job := range item.Value.([]any) {
				setKubeconfig(job.(goyaml.MapSlice), kubeconfig)
			}
		}
		if item.Key != "rule_files" {
			kept = append(kept, item)
		}
	}
	if len(files) > 0 {
		kept = append(kept, goyaml.MapItem{Key: "rule_files", Value: files})
	}
	return goyaml.Marshal(kept)
}

func setKubeconfig(job goyaml.MapSlice, kubeconfig string) {
	if kubeconfig == "" {
		return
	}
	for i := range job {
		if job[i].Key != "kubernetes_sd_configs" {
			continue
		}
		list := job[i].Value.([]any)
		for j := range list {
			list[j] = append(list[j].(goyaml.MapSlice), goyaml.MapItem{Key: "kubeconfig_file", Value: kubeconfig})
		}
	}
}
