#!/usr/bin/env bash
# `make fresh`: README's two commands in a fresh clone of HEAD in an empty folder, with their times.
set -euo pipefail
cd "$(dirname "$0")/.."
source_repo=$PWD
folder=$(mktemp -d "${TMPDIR:-/tmp}/foveal-fresh.XXXXXX")
trap 'rm -rf "$folder"' EXIT
git clone --quiet "$source_repo" "$folder/foveal"
cd "$folder/foveal"
# The commands are read from README itself: what it says is what is run.
mapfile -t commands < <(awk '/^```sh first/{on=1;next} /^```/{on=0} on' README.md)
[ "${#commands[@]}" -eq 2 ] || { echo "README must open with two commands" >&2; exit 1; }
for command in "${commands[@]}"; do
  started=$SECONDS
  echo "=== $command"
  bash -c "$command"
  echo "=== $command took $((SECONDS - started)) s"
done
