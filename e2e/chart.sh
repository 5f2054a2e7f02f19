#!/usr/bin/env bash
# chart.sh: checks the chart, and the objects that the operator makes, with every tool that can be had.
#   helm lint --strict, rendering twice, helm-unittest (Helm 3 and 4), promtool, kubeconform on
#   schemas of a running API server, kube-score, checkov.
# Tools are built or installed under $TOOLS, outside the tree; a step whose tool cannot be had says
# SKIPPED, also in the file FOVEAL_NOT_RUN if that is set, and with STRICT=1 fails. HELM names the
# Helm 4 (default: built by e2e/cluster/build.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
root=${FOVEAL_E2E:-/var/tmp/foveal-e2e}
export TOOLS=${TOOLS:-$root/tools}
chart=charts/foveal
python=${PYTHON:-.venv/bin/python}
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
num_skipped=0

say() { printf '\n=== %s\n' "$*"; }

skip() {
  num_skipped=$((num_skipped + 1))
  echo "SKIPPED: $*"
  echo "make chart: $*" >>"${FOVEAL_NOT_RUN:-/dev/null}"
  [ "${STRICT:-0}" = 0 ]
}

# Prints where the tool is; builds it first where it can.
tool() {
  if e2e/tools/build.sh "$1" >"$out/build.log" 2>&1; then
    echo "$TOOLS/$1"
  else
    tail -n 3 "$out/build.log" >&2
    return 1
  fi
}

renderings() { # as names and options, one a line
  echo "default"
  for file in "$chart"/ci/*.yaml; do
    echo "$(basename "$file" .yaml) --values $file"
  done
}

check_with_helm() { # HELM: lint, two equal renderings, refusal of an unknown value
  local helm=$1 name options first second
  "$helm" version --short
  while read -r name options; do
    # shellcheck disable=SC2086
    "$helm" lint --strict --quiet "$chart" $options
    # shellcheck disable=SC2086
    first=$("$helm" template foveal "$chart" -n foveal-system $options | tee "$out/$name.yaml" | sha256sum)
    # shellcheck disable=SC2086
    second=$("$helm" template foveal "$chart" -n foveal-system $options | sha256sum)
    [ "$first" = "$second" ] || { echo "two renderings of $name differ" >&2; return 1; }
  done < <(renderings)
  if "$helm" template foveal "$chart" --set nonsense=1 >/dev/null 2>&1; then
    echo "an unknown value was taken" >&2
    return 1
  fi
  echo "lint --strict and rendering: $(renderings | wc -l) sets of values"
}

same_renderings() { # what one Helm rendered and what the other did, as data
  "$python" - "$1" "$2" <<'END'
import pathlib, sys, yaml
one, two = (pathlib.Path(name) for name in sys.argv[1:])
def objects(file):
    bodies = [body for body in yaml.load_all(file.read_text(), yaml.CSafeLoader) if body]
    key = lambda body: (body["kind"], body["metadata"].get("namespace", ""), body["metadata"]["name"])
    return {key(body): body for body in bodies}
for file in sorted(one.glob("*.yaml")):
    assert objects(file) == objects(two / file.name), f"Helm 3 and 4 render {file.name} differently"
print(f"Helm 3 and 4 render the same: {len(list(one.glob('*.yaml')))} sets of values")
END
}

say "Helm 4"
helm4=${HELM:-$root/helm/helm}
[ -x "$(command -v "$helm4")" ] || e2e/cluster/build.sh helm || true
if [ -x "$(command -v "$helm4")" ]; then check_with_helm "$helm4"; else skip "no Helm 4"; fi
mkdir "$out/four" && mv "$out"/*.yaml "$out/four" 2>/dev/null || true

say "Helm 3"
if helm3=$(tool helm3); then
  check_with_helm "$helm3"
  mkdir "$out/three" && mv "$out"/*.yaml "$out/three"
  [ ! -e "$out/four/default.yaml" ] || same_renderings "$out/three" "$out/four"
else skip "Helm 3 cannot be built"; fi
rendered=$out/four
[ -e "$rendered/default.yaml" ] || rendered=$out/three
[ -e "$rendered/default.yaml" ] || { echo "no Helm at all: nothing to check" >&2; exit 1; }

say "helm-unittest"
if unittest=$(tool helm-unittest); then "$unittest" "$chart"; else skip "helm-unittest cannot be built"; fi

say "promtool: rules parse, fire when they should, are quiet otherwise; dashboards parse"
if promtool=$(tool promtool); then
  "$promtool" check rules "$chart/files/rules.yaml"
  PATH=$TOOLS:$PATH "$python" -m pytest -q --timeout 600 tests/control_plane/observability/test_alert_rules.py
else skip "promtool cannot be built"; fi

say "GitOps: health.lua by Argo CD's own package, kstatus and healthCheckExprs by Flux's"
tool argo-health >/dev/null || skip "argo-health cannot be built"
tool flux-health >/dev/null || skip "flux-health cannot be built"
"$python" -m pytest -q tests/control_plane/chart/test_gitops.py

say "GitOps: the examples, by the definitions that Argo CD and Flux ship, at a real API server"
if e2e/tools/crds.sh argo flux && e2e/cluster/build.sh etcd kube-apiserver; then
  "$python" -m pytest -q -m api_server -k examples_fit tests/control_plane/api_server/test_gitops.py
else skip "no definitions of Argo CD and Flux, or no API server"; fi

say "kubeconform: chart, crds/, examples and the operator's objects"
schemas=$root/schemas
if kubeconform=$(tool kubeconform) && e2e/cluster/build.sh etcd kube-apiserver &&
  PYTHONPATH=.:runtime/src:operator/src "$python" -m e2e.schemas "$schemas"; then
  template="$schemas/{{.Group}}/{{.ResourceKind}}_{{.ResourceAPIVersion}}.json"
  "$kubeconform" -summary -schema-location "$template" \
    "$rendered" crds tests/control_plane/golden examples/gitops/models
else skip "no kubeconform, or no API server to take schemas from"; fi

# The pod of `helm test` is apart: it runs once, so nothing probes it.
mkdir "$out/lasting" "$out/once"
for file in "$rendered"/*.yaml; do
  "$python" - "$file" "$out/lasting/$(basename "$file")" "$out/once/$(basename "$file")" <<'END'
import pathlib, sys, yaml
source, lasting, once = (pathlib.Path(name) for name in sys.argv[1:])
bodies = [body for body in yaml.load_all(source.read_text(), yaml.CSafeLoader) if body]
hook = "helm.sh/hook"
for target, wanted in ((lasting, False), (once, True)):
    kept = [b for b in bodies if (hook in b["metadata"].get("annotations", {})) == wanted]
    target.write_text(yaml.dump_all(kept, Dumper=yaml.CSafeDumper, sort_keys=False))
END
done

say "kube-score: nothing critical"
if score=$(tool kube-score); then
  if ! "$score" score --output-format ci "$out"/lasting/*.yaml "$out"/once/*.yaml >"$out/score" ||
    ! grep -q '^\[OK\]' "$out/score"; then
    grep -v '^\[OK\]' "$out/score" || true
    exit 1
  fi
  echo "$(grep -c '^\[OK\]' "$out/score") checks passed, $(grep -c '^\[WARNING\]' "$out/score" || true) warnings"
  grep '^\[WARNING\]' "$out/score" || true
else skip "kube-score cannot be built"; fi

say "checkov: nothing failed but for three skips"
if checkov=$(e2e/tools/checkov.sh); then
  # 1. CKV_K8S_38: operator and test speak to the API server, so their token is mounted.
  # 2. CKV_K8S_8, 3. CKV_K8S_9: the pod of `helm test` runs once; it has no probes.
  # Images are pinned by digest where they are checked: ci/*.yaml, not the bare defaults.
  rm "$out/lasting/default.yaml" "$out/once/default.yaml"
  scan=("$checkov" --framework kubernetes --compact --quiet --skip-download)
  "${scan[@]}" --directory "$out/lasting" --skip-check CKV_K8S_38
  "${scan[@]}" --directory "$out/once" --skip-check CKV_K8S_38,CKV_K8S_8,CKV_K8S_9
  echo "checkov: 0 failed"
else skip "checkov cannot be installed"; fi

say "done; $num_skipped steps skipped"
