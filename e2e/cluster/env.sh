# shellcheck shell=bash
# Sourced by every script here: where things lie, and the few verbs they share. FOVEAL_E2E moves
# everything (binaries, images, state); nothing else on the machine is written to.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
repo=$(cd "$here/../.." && pwd)
root=${FOVEAL_E2E:-/var/tmp/foveal-e2e}
bin=$root/cp/bin
state=$root/run    # pids, logs, keys, etcd: gone after down.sh
node=$root/node    # containerd and kubelet; its images survive down.sh, the rest does not
images=$root/img
store=$root/containers

namespace=foveal-e2e
host_ip=10.200.0.1
node_ip=10.200.0.2
api_port=16443
service_cidr=10.96.0.0/16
pod_cidr=10.244.0.0/16
node_name=node1
export PATH=$bin:$root/containerd:$root/helm:$PATH

in_netns() { nsenter --net="/run/netns/$namespace" "$@"; }

# start NAME PROGRAM ARG...: in the cluster's network, log and pid by name.
start() {
  local name=$1
  shift
  setsid nsenter --net="/run/netns/$namespace" "$@" >"$state/log/$name.log" 2>&1 </dev/null &
  echo $! >"$state/pids/$name"
}

# await SECONDS WHAT COMMAND...: until it succeeds; says what did not come true.
await() {
  local seconds=$1 what=$2 end=$((SECONDS + $1))
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ]; then
      echo "not within $seconds s: $what" >&2
      return 1
    fi
    sleep 0.1
  done
}

timed() {
  local started=$EPOCHREALTIME
  "$@" || return
  printf '%7.1f s  %s\n' "$(bc <<<"$EPOCHREALTIME - $started")" "$1"
}

need_gib() {
  local free
  free=$(($(df --output=avail -k "$root" | tail -n 1) / 1024 / 1024))
  [ "$free" -ge "$1" ] || { echo "$2: needs $1 GiB of free disk under $root, found $free" >&2; return 1; }
}

kubectl_admin() { kubectl --kubeconfig "$state/pki/admin.kubeconfig" "$@"; }
buildah_here() {
  mkdir -p "$store/tmp"
  TMPDIR=$store/tmp buildah --root "$store/storage" --runroot "$store/run" --storage-driver overlay "$@"
}
