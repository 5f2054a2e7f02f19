module foveal.dev/e2e/tools/helm-unittest

go 1.26.0

replace github.com/vmware-labs/yaml-jsonpath => github.com/helm-unittest/yaml-jsonpath v0.4.0
