#!/usr/bin/env bash
# load.sh NAME...: images that images.sh built, into the running node's containerd. Only layers that
# it lacks are sent; what it has lies here as files without content (a layer of torch is 5 GB).
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
layouts=$images/layouts
content=$node/containerd/root/io.containerd.content.v1.content/blobs/sha256

in_node() { ctr -a "$node/containerd.sock" -n k8s.io "$@" 2> >(grep -v DEPRECATION >&2); }

load() {
  local reference=localhost/$1 layout=$layouts/${1//[\/:]/_} blob size
  local known=$state/known-blobs send=$state/send digest
  mkdir -p "$layout/blobs/sha256"
  in_node content ls -q | sort >"$known"
  # What the node has is not written here again: a file of that name passes for it.
  in_node content ls | awk 'NR > 1 && $2 ~ /[MG]B$/ { print $1 }' | while read -r digest; do
    blob=$layout/blobs/sha256/${digest#sha256:}
    [ -e "$blob" ] ||
      truncate -s "$(stat -c %s "$content/${digest#sha256:}")" "$blob"
  done
  # A layer that is neither in the node nor whole here has to be written anew.
  find "$layout/blobs/sha256" -type f -size +0 2>/dev/null | while read -r blob; do
    if [ "$(stat -c %b "$blob")" = 0 ] && ! grep -qx "sha256:${blob##*/}" "$known"; then
      rm "$blob"
    fi
  done
  rm -f "$layout/index.json"
  buildah_here push --quiet --disable-compression "$reference" "oci:$layout:$reference" || return
  (
    cd "$layout"
    printf '%s\n' oci-layout index.json
    find blobs -type f | while read -r blob; do
      grep -qx "sha256:${blob##*/}" "$known" || echo "$blob"
    done
  ) >"$send"
  tar -C "$layout" -cf - -T "$send" | in_node images import - >>"$state/log/import.log" || return
  find "$layout/blobs/sha256" -type f -size +1M | while read -r blob; do
    size=$(stat -c %s "$blob")
    truncate -s 0 "$blob"
    truncate -s "$size" "$blob"
  done
}

# containerd may drop a layer that no image uses any more after it was counted as there: the second
# time it is sent.
for image in "$@"; do timed load "$image" || timed load "$image"; done
