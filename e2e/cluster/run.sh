#!/usr/bin/env bash
# run.sh [PYTEST ARGUMENT...]: builds what is missing, brings a cluster up, runs tests/cluster on it,
# and takes it down again whatever happened. FOVEAL_E2E_KEEP=1 leaves it up (down.sh ends it).
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
[ "$(id -u)" = 0 ] || { echo "a node needs root: namespaces, mounts, cgroups" >&2; exit 1; }

programs=(containerd:containerd runc:runc iptables:iptables conntrack:conntrack buildah:buildah
  mmdebstrap:mmdebstrap bc:bc gcc:gcc openssl:openssl ip:iproute2 nsenter:util-linux)
missing=()
for program in "${programs[@]}"; do
  command -v "${program%%:*}" >/dev/null || missing+=("${program##*:}")
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

finish() {
  local code=$?
  if [ -n "${FOVEAL_E2E_KEEP:-}" ]; then
    echo "left up: export KUBECONFIG=$state/pki/admin.kubeconfig PATH=$bin:$root/helm:\$PATH"
  else
    timed take_down || code=1
  fi
  exit $code
}
programs() { "$here/build.sh" node; }
images() { "$here/images.sh"; }
bring_up() { "$here/up.sh"; }
take_down() { "$here/down.sh"; }
load_images() { "$here/load.sh" foveal/operator:e2e foveal/runtime:e2e; }

timed programs
timed images
trap finish EXIT
trap 'exit 130' INT TERM
if [ ! -e "$state/pids" ]; then timed bring_up; fi
timed load_images
cd "$repo"
timeout "${FOVEAL_E2E_SECONDS:-1200}" .venv/bin/pytest -q -s -m cluster --timeout 600 \
  tests/cluster "$@"
