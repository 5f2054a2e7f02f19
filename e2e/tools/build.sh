#!/usr/bin/env bash
# build.sh TOOL...: promtool and helm-unittest from their pinned modules, into $TOOLS (kept outside the tree).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${TOOLS:-/var/tmp/foveal-e2e/tools}
mkdir -p "$out"
export CGO_ENABLED=0
for tool in "$@"; do
  case $tool in
    promtool) package=github.com/prometheus/prometheus/cmd/promtool ;;
    helm-unittest) package=github.com/helm-unittest/helm-unittest/cmd/helm-unittest ;;
    *) echo "unknown tool: $tool" >&2; exit 2 ;;
  esac
  (cd "$here/$tool" && go build -trimpath -ldflags "-s -w" -o "$out/$tool" "$package")
  echo "$out/$tool"
done
