#!/usr/bin/env bash
# release.sh: builds a release into dist/ and checks it. Nothing is published.
#   1. a wheel and an sdist of both distributions, checked by `twine check --strict`
#   2. the chart, packaged by Helm (HELM names the program; default: e2e/cluster/build.sh builds it)
#   3. both wheels in an empty environment, away from the repository: `foveal plan`,
#      `foveal-runtime --help`, and `foveal-runtime serve` answering a question about an image
# At the end it prints the image tags that belong to the release.
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
version=$(cat VERSION)
uv=$repo/.venv/bin/uv
work=$(mktemp -d)
server=
finish() {
  [ -z "$server" ] || { kill "$server" 2>/dev/null && wait "$server" || true; }
  rm -rf "$work"
}
trap finish EXIT

say() { printf '\n=== %s\n' "$*"; }

say "wheels and sdists"
rm -rf dist && mkdir dist
for name in runtime operator; do
  # Built from a copy, so that no build output is left in the tree.
  git ls-files -z --cached --others --exclude-standard "$name" | tar --null -T - -c | tar -x -C "$work"
  FOVEAL_REQUIRE_KERNELS=1 "$uv" build --quiet --no-build-isolation --python .venv/bin/python \
    --out-dir dist "$work/$name"
done
rm -f dist/.gitignore
"$uv" venv --quiet --python .venv/bin/python "$work/tools"
"$uv" pip install --quiet --python "$work/tools" --require-hashes -r requirements/release.txt
"$work/tools/bin/twine" check --strict dist/*

say "chart"
helm=${HELM:-$(command -v helm || echo "${FOVEAL_E2E:-/var/tmp/foveal-e2e}/helm/helm")}
[ -x "$helm" ] || e2e/cluster/build.sh helm
"$helm" package charts/foveal --destination dist
"$helm" template foveal "dist/foveal-$version.tgz" >/dev/null

say "an empty environment"
"$uv" venv --quiet --python .venv/bin/python "$work/empty"
"$uv" pip install --quiet --python "$work/empty" --require-hashes -r requirements/run.txt
"$uv" pip install --quiet --python "$work/empty" --no-deps dist/*.whl
"$uv" pip check --python "$work/empty"
export PATH=$work/empty/bin:$PATH
unset PYTHONPATH
cd "$work"
python - "$version" "$repo/.venv" <<'END'
import importlib.metadata, importlib.resources, sys
for name in ("foveal-operator", "foveal-runtime"):
    assert importlib.metadata.version(name) == sys.argv[1], name
    files = importlib.resources.files(name.replace("-", "_"))
    assert (files / "py.typed").is_file(), f"{name} has no py.typed"
    assert sys.argv[2] not in str(files), files
    shipped = {str(path) for path in importlib.metadata.files(name)}
    assert any(path.endswith("licenses/LICENSE") for path in shipped), f"{name} has no license"
END
foveal plan -f "$repo/examples/mmi-cpu-laptop.yaml" --profile "$repo/examples/profiles/tiny-vlm.json" |
  grep -x 'Fits\.'
foveal-runtime --help | grep -c serve >/dev/null
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
foveal-runtime serve "$repo/examples/tiny-vlm/model" --name tiny-vlm --port "$port" >serve.log 2>&1 &
server=$!
for _ in $(seq 300); do
  if python - "$port" "$repo/examples/tiny-vlm/question.json" 2>/dev/null >answer <<'END'
import json, sys, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions"
body = open(sys.argv[2], "rb").read()
request = urllib.request.Request(url, body, {"content-type": "application/json"})
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
END
  then break; fi
  kill -0 "$server" || { tail -n 20 serve.log >&2; exit 1; }
  sleep 1
done
grep -x 7 answer >/dev/null || { echo "wrong or no answer: $(cat answer)" >&2; tail -n 20 serve.log >&2; exit 1; }
echo "foveal-runtime serve answered: $(cat answer)"

say "release $version"
(cd "$repo/dist" && sha256sum ./*)
echo "images: foveal/operator:$version foveal/runtime:$version"
