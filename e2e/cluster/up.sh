#!/usr/bin/env bash
# up.sh: a Kubernetes cluster of one node on this machine, with cluster DNS. Needs root, what
# build.sh built, and the images pause and coredns. kubectl: --kubeconfig $FOVEAL_E2E/run/pki/admin.kubeconfig
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
[ ! -e "$state/pids" ] || { echo "$state/pids exists: up already, or down.sh has to run first" >&2; exit 1; }
mkdir -p "$state"/{pids,log}

network() { "$here/netns.sh" up; }
keys() { "$here/certs.sh"; }
control_plane() { "$here/control-plane.sh"; }
registry() { start registry python3 "$here/registry.py" "$images/layouts" 127.0.0.1 80; }
node_ready() { "$here/node.sh" start; }
images() { "$here/load.sh" pause:e2e coredns:e2e; }
cluster_dns() {
  kubectl_admin apply -f "$here/conf/coredns.yaml" >/dev/null
  kubectl_admin -n kube-system rollout status deployment/coredns --timeout=90s >/dev/null
}

for step in network keys control_plane registry node_ready images cluster_dns; do timed "$step"; done
