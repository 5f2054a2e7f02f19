#!/usr/bin/env bash
# chart.sh: the chart through Helm's own tools: lint --strict, rendering twice, helm-unittest.
# HELM names one helm or several ("helm3 helm4"); HELM_UNITTEST its test runner (e2e/tools/build.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
chart=charts/foveal
tools=${TOOLS:-/var/tmp/foveal-e2e/tools}
unittest=${HELM_UNITTEST:-$tools/helm-unittest}
full=(--set metrics.podMonitor.enabled=true --set metrics.prometheusRule.enabled=true
  --set rbac.scope=namespaced --set 'rbac.watchNamespaces={a,b}'
  --set sample.enabled=true --set sample.spec.model.uri=pvc://models/tiny)

for helm in ${HELM:-helm}; do
  "$helm" version --short
  "$helm" lint --strict "$chart"
  "$helm" lint --strict "$chart" "${full[@]}"
  first=$("$helm" template foveal "$chart" -n foveal-system "${full[@]}" | sha256sum)
  second=$("$helm" template foveal "$chart" -n foveal-system "${full[@]}" | sha256sum)
  [ "$first" = "$second" ] || { echo "two renderings differ" >&2; exit 1; }
  if "$helm" template foveal "$chart" --set nonsense=1 >/dev/null 2>&1; then
    echo "an unknown value was taken" >&2
    exit 1
  fi
done
"$unittest" "$chart"
