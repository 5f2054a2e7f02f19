#!/usr/bin/env bash
# down.sh [all]: ends what up.sh started, by recorded pid, and removes its network, mounts and
# cgroups. Logs, binaries and images stay; `all` takes the node's images and the logs as well.
set -uo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

alive() {
  local file
  for file in "$state"/pids/*; do
    case $file in *.inside | *'*') continue ;; esac
    kill -0 "$(cat "$file")" 2>/dev/null && return 0
  done
  return 1
}
all_gone() { ! alive; }

remove_cgroups() {
  local group left=0
  for group in /sys/fs/cgroup/*/"$namespace" /sys/fs/cgroup/"$namespace"; do
    [ -d "$group" ] || continue
    find "$group" -depth -type d -exec rmdir {} \; 2>/dev/null
    [ ! -d "$group" ] || left=1
  done
  return $left
}

"$here/node.sh" stop
for name in registry scheduler controller-manager apiserver etcd; do
  pid=$(cat "$state/pids/$name" 2>/dev/null) && kill -KILL "$pid" 2>/dev/null
done
failed=0
await 30 "every process ended" all_gone || failed=1
await 30 "the cgroups are removed" remove_cgroups || failed=1
"$here/netns.sh" down
grep -F " $node/" /proc/self/mounts | cut -d ' ' -f 2 | sort -r | while read -r path; do
  umount -l "$path"
done
rm -rf "$state/etcd" "$state/pids" "$state/pki" "$node/kubelet" "$node/containerd/state" "$node/cni-ipam"
rmdir /var/lib/kubelet /var/lib/cni /var/log/containers 2>/dev/null
[ "${1:-}" != all ] || rm -rf "$node" "$state"
exit $failed
