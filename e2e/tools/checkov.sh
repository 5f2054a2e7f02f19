#!/usr/bin/env bash
# checkov.sh: checkov in a virtual environment of its own, under $TOOLS; prints the program's path.
# Its hundred packages never meet those that Foveal runs with.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
venv=${TOOLS:-/var/tmp/foveal-e2e/tools}/checkov
stamp=$(sha256sum <"$root/requirements/checkov.txt")
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes \
    -r "$root/requirements/uv.txt" >&2
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --require-hashes \
    -r "$root/requirements/checkov.txt" >&2
  echo "$stamp" >"$venv/.stamp"
fi
echo "$venv/bin/checkov"
