#!/usr/bin/env bash
# release.sh: builds a release into dist/ and checks it. Nothing is published.
#   1. a wheel and an sdist of each distribution, checked by `twine check --strict`
#   2. the chart, packaged by Helm (HELM names the program; default: e2e/cluster/build.sh builds it)
#   3. `foveal`, which brings both wheels, in an empty environment, away from the repository:
#      `foveal plan`, then `foveal serve` with an empty HOME downloading the bundled model from a hub
#      on the loopback, the page in Chromium, an answer, and `foveal bench` (fresh_environment.py);
#      as root on Debian once more in a root directory of its own (fresh_root.sh)
# At the end it prints the image tags that belong to the release.
set -euo pipefail
cd "$(dirname "$0")/.."
repo=$PWD
version=$(cat VERSION)
uv=$repo/.venv/bin/uv
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf '\n=== %s\n' "$*"; }

say "wheels and sdists"
rm -rf dist && mkdir dist
for name in runtime operator packaging; do
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
# By its name alone; what run.txt pins is there, so only our wheels are left to find.
"$uv" pip install --quiet --python "$work/empty" --no-index --find-links dist foveal
"$uv" pip check --python "$work/empty"
export PATH=$work/empty/bin:$PATH
unset PYTHONPATH
cd "$work"
python - "$version" "$repo/.venv" <<'END'
import importlib.metadata, importlib.resources, sys
for name in ("foveal", "foveal-operator", "foveal-runtime"):
    assert importlib.metadata.version(name) == sys.argv[1], name
    shipped = {str(path) for path in importlib.metadata.files(name)}
    assert any(path.endswith("licenses/LICENSE") for path in shipped), f"{name} has no license"
    if name == "foveal":
        assert all(".dist-info/" in path for path in shipped), "foveal has metadata alone"
        continue
    files = importlib.resources.files(name.replace("-", "_"))
    assert (files / "py.typed").is_file(), f"{name} has no py.typed"
    assert sys.argv[2] not in str(files), files
END
foveal plan -f "$repo/examples/mmi-cpu-laptop.yaml" --profile "$repo/examples/profiles/tiny-vlm.json" |
  grep -x 'Fits\.'
foveal-runtime --help | grep -c serve >/dev/null
(cd "$repo" && PYTHONPATH=. .venv/bin/python -m e2e.fresh_environment "$work/empty")

# The same by pip in a root directory that has this machine's /usr and nothing of the checkout. The
# packages of run.txt are put there as they are: downloading 3 GB again would show nothing new.
if [ "$(id -u)" = 0 ] && unshare --mount true 2>/dev/null && [ -x /usr/bin/python3 ] &&
  [ -e /usr/share/python-wheels ] &&
  [ "$(/usr/bin/python3 -c 'import sys; print(sys.version_info[:2])')" = \
    "$("$repo/.venv/bin/python" -c 'import sys; print(sys.version_info[:2])')" ]; then
  say "a root directory of its own"
  mkdir -p "$work/fresh/wheels" "$work/fresh/packages"
  cp "$repo"/dist/*.whl "$work/fresh/wheels"
  cp -al "$work"/empty/lib/python3*/site-packages/. "$work/fresh/packages"
  rm -rf "$work"/fresh/packages/foveal*
  (cd "$repo" && PYTHONPATH=. .venv/bin/python -m e2e.fresh_environment --root "$work/fresh")
else
  say "no root directory of its own: needs root, mount namespaces and Debian's python3-venv of this version"
fi

say "release $version"
(cd "$repo/dist" && sha256sum ./*)
echo "images: foveal/operator:$version foveal/runtime:$version"
