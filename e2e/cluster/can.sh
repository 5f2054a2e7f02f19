#!/usr/bin/env bash
# can.sh [MINUTES]: can a node be brought up here, and does the short form end within MINUTES?
# Says nothing and succeeds, or says why not in one line and fails. Changes nothing that stays.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
# Minutes on two cores with nothing else to do, as measured; e2e/results/measurements.md.
tests_minutes=18 programs_minutes=14 tools_minutes=5 images_minutes=14

no() { echo "$*"; exit 1; }

writable_cgroup() {
  local hierarchy=/sys/fs/cgroup
  [ -f "$hierarchy/cgroup.controllers" ] || hierarchy+=/memory
  mkdir "$hierarchy/$namespace-probe" 2>/dev/null && rmdir "$hierarchy/$namespace-probe"
}

# Namespaces with mounts in them, and an overlay over the folder where images will lie.
namespaces() {
  local probe code=0
  probe=$(mktemp -d "$root/probe.XXXXXX")
  mkdir "$probe"/{lower,upper,work,all}
  unshare --mount --pid --uts --net --fork --mount-proc mount -t overlay overlay -o \
    "lowerdir=$probe/lower,upperdir=$probe/upper,workdir=$probe/work" "$probe/all" \
    2>/dev/null || code=1
  rm -rf "$probe"
  return $code
}

minutes() { # that it would take, with what has to be built first
  local need=$tests_minutes
  "$here/build.sh" --missing node >/dev/null || need=$((need + programs_minutes))
  [ -x "$root/tools/prometheus" ] && [ -x "$root/tools/scrape-config" ] ||
    need=$((need + tools_minutes))
  [ -e "$images/runtime.inputs" ] || need=$((need + images_minutes))
  echo "$need"
}

[ "$(id -u)" = 0 ] || no "it needs root"
command -v apt-get >/dev/null || no "it needs Debian's packages"
mkdir -p "$root"
writable_cgroup || no "this machine lets nobody make control groups"
namespaces || no "this machine lets nobody make namespaces with overlay mounts in them"
[ ! -e "/run/netns/$namespace" ] || no "a cluster is up already: e2e/cluster/down.sh ends it"
need=$("$here/images.sh" --gib)
said=$(need_gib "$need" "a node" 2>&1) || no "$said"
if [ -n "${1:-}" ]; then
  need=$(minutes)
  [ "$need" -le "$1" ] || no "it takes about $need minutes, and $1 are left"
fi
