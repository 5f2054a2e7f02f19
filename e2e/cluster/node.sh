#!/usr/bin/env bash
# node.sh start|stop|run COMMAND...|restart-kubelet: containerd, kube-proxy and kubelet in private
# mount, pid and uts namespaces, in the cluster's network. Their first process is all that has to be
# killed: every container and every mount goes with it. `run` runs a command beside them.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

render() {
  sed -e "s#@node@#$node#g; s#@state@#$state#g; s#@pod_cidr@#$pod_cidr#g" "$here/conf/$1" >"$2"
}

prepare() {
  mkdir -p "$node"/{cni,containerd,kubelet,conf,volume-plugins,pod-logs}
  render bridge.conflist "$node/cni/10-bridge.conflist"
  render containerd.toml "$node/conf/containerd.toml"
  render kubelet.yaml "$node/conf/kubelet.yaml"
  render kube-proxy.yaml "$node/conf/kube-proxy.yaml"
  mkdir -p "$node/conf/registries/localhost"
  printf '[host."http://localhost"]\n  capabilities = ["pull", "resolve"]\n' \
    >"$node/conf/registries/localhost/hosts.toml"
  echo "nameserver ${service_cidr%.*}.10" >"$node/conf/resolv.conf"
  rm -f "$node"/containerd.sock*  # a stale one would pass for a running containerd
  local hierarchy
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then
    mkdir -p "/sys/fs/cgroup/$namespace"
    return
  fi
  for hierarchy in /sys/fs/cgroup/*/; do  # the kubelet looks for its root in each of them
    mkdir -p "$hierarchy$namespace"
    case $hierarchy in
      */cpuset/)
        cat "${hierarchy}cpuset.cpus" >"$hierarchy$namespace/cpuset.cpus"
        cat "${hierarchy}cpuset.mems" >"$hierarchy$namespace/cpuset.mems"
        ;;
      # Else all pods together weigh as much as one process outside.
      */cpu/ | */cpu,cpuacct/) echo 8192 >"$hierarchy$namespace/cpu.shares" ;;
    esac
  done
}

# The first process of the namespaces, as seen from outside.
node_init() {
  local outer
  outer=$(cat "$state/pids/node" 2>/dev/null) || return
  cat "/proc/$outer/task/$outer/children" 2>/dev/null
}

run_inside() {
  local init
  init=$(node_init)
  nsenter --target "${init%% *}" --mount --pid --uts --net -- "$@"
}

keep_kubelet() {  # a node restarts its kubelet; so does this one
  while :; do
    kubelet "--config=$node/conf/kubelet.yaml" "--kubeconfig=$state/pki/kubelet.kubeconfig" \
      "--hostname-override=$node_name" "--node-ip=$node_ip" "--root-dir=$node/kubelet" \
      "--cert-dir=$node/kubelet/pki" >>"$state/log/kubelet.log" 2>&1 </dev/null &
    echo $! >"$state/pids/kubelet.inside"
    wait $! || true
    sleep 1
  done
}

inside() {
  mount --make-rshared /
  hostname "$node_name"
  mount --bind "$node/kubelet" "$node/kubelet"
  mount --make-rshared "$node/kubelet"
  # Paths that programs have built in: private, so that nothing of them stays on the host.
  mount -t tmpfs -o mode=755 tmpfs /run
  mkdir -p /run/netns /run/lock /run/containerd
  local path
  for path in /var/lib/kubelet /var/lib/cni /var/log/containers; do
    mkdir -p "$path"
    mount -t tmpfs tmpfs "$path"
  done
  ln -s "$node/containerd.sock" /run/containerd/containerd.sock  # cAdvisor looks here only
  containerd -c "$node/conf/containerd.toml" >"$state/log/containerd.log" 2>&1 </dev/null &
  kube-proxy "--config=$node/conf/kube-proxy.yaml" "--hostname-override=$node_name" \
    >"$state/log/kube-proxy.log" 2>&1 </dev/null &
  await 60 "containerd answers (log: $state/log/containerd.log)" \
    ctr -a "$node/containerd.sock" version
  keep_kubelet
}

start_node() {
  prepare
  setsid nsenter --net="/run/netns/$namespace" \
    unshare --mount --pid --uts --fork --kill-child=SIGKILL --mount-proc \
    "$0" inside >"$state/log/node.log" 2>&1 </dev/null &
  echo $! >"$state/pids/node"
  await 60 "the node registers (logs: $state/log/{node,kubelet}.log)" \
    kubectl_admin get node "$node_name"
  kubectl_admin wait "node/$node_name" --for=condition=Ready --timeout=90s >/dev/null
}

stop_node() {
  local outer
  outer=$(cat "$state/pids/node" 2>/dev/null) || return 0
  kill -KILL "$outer" 2>/dev/null || true  # its child, the namespaces' init, goes with it
}

case ${1:-} in
  start) start_node ;;
  inside) inside ;;
  stop) stop_node ;;
  run) shift; run_inside "$@" ;;
  restart-kubelet) run_inside kill "$(cat "$state/pids/kubelet.inside")" ;;
  *) echo "usage: node.sh start|stop|run COMMAND...|restart-kubelet" >&2; exit 2 ;;
esac
