#!/usr/bin/env bash
# load.sh NAME...: images that images.sh built, into the running node's containerd; those that are
# there already in the same build are skipped. Piped: a tar of the runtime image would be 6 GB.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"

load() {
  local reference=localhost/$1 id loaded=$node/loaded/${1//[\/:]/_}
  id=$(buildah_here inspect --type image --format '{{.FromImageID}}' "$reference")
  [ "$(cat "$loaded" 2>/dev/null)" != "$id" ] || return 0
  buildah_here push --quiet --disable-compression "$reference" \
    "docker-archive:/dev/stdout:$reference" |
    ctr -a "$node/containerd.sock" -n k8s.io images import - >>"$state/log/import.log"
  mkdir -p "$node/loaded"
  echo "$id" >"$loaded"
}

for image in "$@"; do timed load "$image"; done
