#!/usr/bin/env bash
# crds.sh [prometheus-operator|flux|argo]...: definitions of other projects' resources, as they ship
# them in their Go modules, into $TOOLS/crds/NAME. Pinned by hash; what is there is skipped.
# HelmRelease's is in no module: it is made from its types by the program that its project uses.
set -euo pipefail
out=${TOOLS:-/var/tmp/foveal-e2e/tools}/crds
controller_gen=v0.21.0
export GOTOOLCHAIN=local
PATH=$PATH:${FOVEAL_E2E:-/var/tmp/foveal-e2e}/go/bin  # where e2e/cluster/build.sh puts one

module() { # NAME@VERSION SUM: prints its folder
  local said folder
  said=$(go mod download -json "$1")
  grep -qF "\"Sum\": \"$2\"" <<<"$said" || { echo "$1 has another hash than $2" >&2; return 1; }
  folder=$(sed -nE 's/^.*"Dir": "(.*)",$/\1/p' <<<"$said")
  echo "$folder"
}

fetch() { # NAME: into the folder $made
  local folder
  case $1 in
    prometheus-operator)
      folder=$(module github.com/prometheus-operator/prometheus-operator@v0.93.1 \
        h1:4Juk8v93RdG1DSGD/mGp+SeQKPmnlLIj2iq3blLZgFY=)
      cp "$folder"/example/prometheus-operator-crd/*_{podmonitors,servicemonitors,prometheusrules}.yaml "$made" ;;
    argo)
      folder=$(module github.com/argoproj/argo-cd/v3@v3.2.12 \
        h1:XbOyqcoPIjMhiP+y05Zi2U+HfG3b2TNfGJgVuK5Y8g0=)
      cp "$folder"/manifests/crds/{application,applicationset,appproject}-crd.yaml "$made" ;;
    flux)
      folder=$(module github.com/fluxcd/source-controller@v1.9.6 \
        h1:nG534/bI6nVpyHra7ONAk6xDB3xPsVT+EOLHZHXPrrc=)
      cp "$folder"/config/crd/bases/*_gitrepositories.yaml "$made"
      folder=$(module github.com/fluxcd/kustomize-controller@v1.9.6 \
        h1:XB+G3A0mky0j5uVHZWv4oSlS2RvZBoNIUhstIvY0JKE=)
      cp "$folder"/config/crd/bases/*_kustomizations.yaml "$made"
      folder=$(module github.com/fluxcd/helm-controller/api@v1.6.5 \
        h1:ElqM5KIpdUwVK1VSi1fXcMwOlf0LghuqwM2SwqaTyNs=)
      module "sigs.k8s.io/controller-tools@$controller_gen" \
        h1:KXDQza3bgjlPY6xLR63tI/40gzjhyUAvkCrwzd2/6cs= >/dev/null
      (cd "$folder" && go run "sigs.k8s.io/controller-tools/cmd/controller-gen@$controller_gen" \
        crd paths=./v2 "output:crd:dir=$made") ;;
    *) echo "crds.sh knows no $1" >&2; return 2 ;;
  esac
}

[ $# -gt 0 ] || set -- prometheus-operator flux argo
stamp=$(sha256sum <"$0")
made=
trap '[ -z "$made" ] || rm -rf "$made"' EXIT
mkdir -p "$out"
for name in "$@"; do
  [ "$(cat "$out/$name/.stamp" 2>/dev/null)" != "$stamp" ] || continue
  made=$(mktemp -d "$out/.new.XXXXXX")
  fetch "$name"
  chmod u+w "$made"/*
  echo "$stamp" >"$made/.stamp"
  rm -rf "${out:?}/$name"
  mv "$made" "$out/$name"
  echo "definitions of $name: $(find "$out/$name" -name '*.yaml' | wc -l) in $out/$name"
done
