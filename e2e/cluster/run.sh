#!/usr/bin/env bash
# run.sh [PYTEST ARGUMENT...]: builds what is missing, brings a cluster up, runs tests/cluster on it,
# and takes it down again whatever happened. One at a time on a machine.
#   FOVEAL_CLUSTER=short|full  full runs the tests marked slow as well (soaks; two hours)
#   FOVEAL_E2E_UNTIL=TIME      tests that would begin after it are skipped (seconds since 1970)
#   FOVEAL_E2E_KEEP=1          leaves the cluster up (down.sh ends it)
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
[ "$(id -u)" = 0 ] || { echo "a node needs root: namespaces, mounts, cgroups" >&2; exit 1; }
case ${FOVEAL_CLUSTER:-short} in
  short) wanted="cluster and not slow" seconds=3600 ;;
  full) wanted=cluster seconds=10800 ;;
  *) echo "FOVEAL_CLUSTER is short or full, not $FOVEAL_CLUSTER" >&2; exit 2 ;;
esac
tools=${TOOLS:-$root/tools}
mkdir -p "$root"
exec {lock}>"$root/lock"
flock --nonblock "$lock" || { echo "another run.sh works in $root" >&2; exit 1; }

programs=(runc:runc iptables:iptables conntrack:conntrack buildah:buildah mmdebstrap:mmdebstrap
  bc:bc gcc:gcc openssl:openssl ip:iproute2 nsenter:util-linux)
missing=()
for program in "${programs[@]}"; do
  command -v "${program%%:*}" >/dev/null || missing+=("${program##*:}")
done
[ -x /usr/lib/cni/bridge ] || missing+=(containernetworking-plugins)
if [ ${#missing[@]} -gt 0 ]; then
  apt-get update -q
  apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

tests=
finish() {
  local code=$?
  trap '' INT TERM
  if [ -n "$tests" ]; then
    kill "$tests" 2>/dev/null || true
    wait "$tests" 2>/dev/null || true
  fi
  if [ -n "${FOVEAL_E2E_KEEP:-}" ]; then
    echo "left up: export KUBECONFIG=$state/pki/admin.kubeconfig PATH=$bin:$root/helm:\$PATH"
  else
    timed take_down || code=1
  fi
  exit "$code"
}
enough_disk() { need_gib "$("$here/images.sh" --gib)" "a cluster and its images"; }
programs() {
  "$here/build.sh" node
  TOOLS=$tools "$repo/e2e/tools/build.sh" prometheus scrape-config
  TOOLS=$tools "$repo/e2e/tools/crds.sh" prometheus-operator
  (export TOOLS=$tools; "$repo/e2e/tools/build.sh" helm3 argo-cd && "$repo/e2e/tools/crds.sh" argo) ||
    echo "not built: the test of Argo CD is skipped" >&2
}
images() { "$here/images.sh"; }
bring_up() { "$here/up.sh" {lock}>&-; }  # what it starts outlives a killed run.sh; the lock must not
take_down() { "$here/down.sh"; }
load_images() { "$here/load.sh" foveal/operator:0.1.0 foveal/runtime:0.1.0 foveal/tiny-vlm:0.1.0; }

timed enough_disk
timed programs
timed images
trap finish EXIT
trap 'exit 130' INT TERM
if [ ! -e "$state/pids" ]; then timed bring_up; fi
timed load_images
cd "$repo"
# In the background, so that a signal reaches this script at once. The limit is for tests that
# hang; interrupted, pytest still says what failed before.
timeout --signal=INT --kill-after=60 "$seconds" .venv/bin/pytest -q -s -m "$wanted" --timeout 900 \
  --durations=12 tests/cluster "$@" &
tests=$!
wait "$tests"
