#!/usr/bin/env bash
# Builds images without a registry: images.sh [pause|coredns|tiny-vlm|operator|runtime]... (all)
#   --gib prints how much free disk that needs; --again operator|runtime builds one once more from
#   nothing and fails where a layer has other bytes than before.
#   An image whose inputs did not change is left as it is. A machine's package settings (CA bundle,
#   pip, apt) are lent to the builder by bind mounts: they are in no layer and in no history.
set -euo pipefail
# shellcheck source=e2e/cluster/env.sh
. "$(dirname "$0")/env.sh"
base=localhost/python:3.11-slim-bookworm
epoch=1767225600
pins=(requirements/{build,operator,torch,runtime}.txt)
mkdir -p "$images" "$store"

exists() { buildah_here inspect --type image "$1" >/dev/null 2>&1; }

# GiB that building and loading may take: the runtime's layers lie here, in a layout on their way,
# and twice in the node. Once they are there, a change of code is small; one of pins makes all of
# them anew, beside the old ones (`down.sh all` takes those of the node away).
gib() {
  local need=6 are_new=
  [ "$(cat "$images/runtime.locks" 2>/dev/null)" = "$(inputs_of "${pins[@]}")" ] || are_new=yes
  exists localhost/foveal/runtime:0.1.0 || are_new=yes
  [ -z "$are_new" ] || need=$((need + 14))
  [ -z "$are_new" ] && [ -d "$node/containerd/root" ] || need=$((need + 14))
  echo "$need"
}

base_image() {
  exists "$base" && return
  local container tree
  mmdebstrap --quiet --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates \
    --aptopt='Acquire::Languages "none"' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
    bookworm "$images/base.tar" /etc/apt/sources.list.d/debian.sources
  container=$(buildah_here from scratch)
  buildah_here add --quiet "$container" "$images/base.tar" / >/dev/null
  tree=$(buildah_here mount "$container")
  ln -sf ../../bin/python3 "$tree/usr/local/bin/python"
  rm -rf "$tree"/var/lib/apt/lists/* "$tree"/var/cache/apt/* "$tree"/etc/apt/sources.list*
  mkdir -p "$tree/etc/apt/sources.list.d"
  buildah_here umount "$container" >/dev/null
  buildah_here config --env LANG=C.UTF-8 --cmd python3 --env \
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah_here commit --quiet "$container" "$base" >/dev/null
  buildah_here rm "$container" >/dev/null
  rm -f "$images/base.tar"
}

# What an image is made of, as one hash: tracked and new files, as they are in the tree.
inputs_of() {
  (
    cd "$repo"
    git ls-files -z --cached --others --exclude-standard -- "$@" | sort -z |
      xargs -0 sha256sum 2>/dev/null | sha256sum
  )
}

# What the builder is lent: into the array settings, and as a file.
lend() {
  local lend=$store/lend name_lower variable
  mkdir -p "$lend"
  {
    echo "[global]"
    for variable in $(compgen -e PIP_ | grep -vx PIP_FIND_LINKS); do
      name_lower=${variable#PIP_}
      name_lower=${name_lower,,}
      echo "${name_lower//_/-} = ${!variable}"
    done
  } >"$lend/pip.conf"
  for variable in /etc/apt/sources.list.d /etc/apt/apt.conf.d \
    /etc/ssl/certs/ca-certificates.crt; do
    settings+=(-v "$variable:$variable:ro")
  done
  settings+=(-v "$lend/pip.conf:/etc/pip.conf:ro")
}

bud() { # TARGET NAME [OPTION...]
  local target=$1 name=$2
  shift 2
  buildah_here bud --isolation chroot --pull-never --layers --format oci --timestamp "$epoch" \
    --build-arg "BASE=$base" "${settings[@]}" "$@" --target "$target" -t "$name" "$repo" \
    >"$images/$target.log" 2>&1 || { tail -n 30 "$images/$target.log" >&2; return 1; }
}

layers() {
  buildah_here inspect --type image "$1" |
    python3 -c 'import json, sys; print(*json.load(sys.stdin)["OCIv1"]["rootfs"]["diff_ids"], sep="\n")'
}

again() {
  local name=localhost/foveal/$1 settings=() same
  lend
  bud "$1" "$name:again" --no-cache
  same=$(comm -12 <(layers "$name:0.1.0" | sort) <(layers "$name:again" | sort) | wc -l)
  echo "$1 built again: $same of $(layers "$name:0.1.0" | wc -l) layers are the same bytes"
  cmp -s <(layers "$name:0.1.0") <(layers "$name:again")
}

from_dockerfile() {
  local target=$1 inputs name settings=()
  name=localhost/foveal/$target:0.1.0
  local parts=(Dockerfile .dockerignore LICENSE "${pins[@]}" runtime)
  [ "$target" = runtime ] || parts+=(operator)
  inputs=$(inputs_of "${parts[@]}")
  if [ "$(cat "$images/$target.inputs" 2>/dev/null)" = "$inputs" ] &&
    exists "$name"; then
    return
  fi
  base_image
  lend
  bud "$target" "$name"
  inputs_of "${pins[@]}" >"$images/$target.locks"
  printf '%s\n' "$inputs" >"$images/$target.inputs"
}

from_file() { # NAME PATH ENTRY
  printf 'FROM scratch\nCOPY %s /%s\nENTRYPOINT ["/%s"]\n' "$1" "$1" "$1" |
    buildah_here bud --quiet --isolation chroot --timestamp "$epoch" -f - \
      -t "localhost/$1:e2e" "$2" >/dev/null
}

pause() {
  [ -x "$images/pause" ] || gcc -Os -static -s -o "$images/pause" "$here/pause.c"
  from_file pause "$images"
}
coredns() { from_file coredns "$root/coredns"; }
operator() { from_dockerfile operator; }
runtime() { from_dockerfile runtime; }
tiny-vlm() {
  buildah_here bud --quiet --isolation chroot --layers --timestamp "$epoch" \
    -t localhost/foveal/tiny-vlm:0.1.0 "$repo/examples/tiny-vlm" >/dev/null
}

[ "${1:-}" != --gib ] || { gib; exit; }
[ "${1:-}" != --again ] || { again "$2"; exit; }
[ $# -gt 0 ] || set -- pause coredns tiny-vlm operator runtime
need_gib "$(gib)" "images"
buildah_here rm --all >/dev/null 2>&1 || true  # what a stopped build left behind, with its mounts
rm -rf "${store:?}/tmp"                        # and layers that it was about to write
for image in "$@"; do timed "$image"; done
