#!/usr/bin/env bash
# Everything about GPUs in one run of at most ten minutes: correctness, kernels, steps, serving.
#
#   e2e/bench/gpu.sh [PART ...]          all parts, or those named; results in $OUT, default
#                                        out/gpu-DATE
#
# FOVEAL_PYTHON: an environment that has everything; else one is made beside the results, on top of
# the packages of $PYTHON (default python3), which must have torch with CUDA.
# FOVEAL_WHEELS: a folder of wheels to take missing packages from, where there is no network.
# Ends with 2 without a GPU, with 1 when something was wrong or did not end in time (never because
# it was slow), else with 0.
set -uo pipefail
cd "$(dirname "$0")/../.."
parts=" attention-tests layer-tests architectures-fp32 architectures-bf16 attention step step-int4 first-token serving "
wanted=" $* "
for name in "$@"; do
  if [ "${parts/ $name /}" = "$parts" ]; then
    echo "gpu.sh: there is no part '$name'; the parts are:$parts" >&2
    exit 2
  fi
done
OUT=${OUT:-out/gpu-$(date +%Y-%m-%d-%H%M%S)}
PYTHON=${PYTHON:-python3}
if ! timeout 60 nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "gpu.sh: there is no NVIDIA GPU here" >&2
  exit 2
fi
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)

if [ -z "${FOVEAL_PYTHON:-}" ]; then
  venv=${FOVEAL_VENV:-/tmp/foveal-gpu-venv}
  "$PYTHON" -m venv --system-site-packages "$venv" || exit 1
  # A venv made from a venv sees only the base installation: its packages are named by a path file.
  "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
    > "$(echo "$venv"/lib/python*/site-packages)/below.pth"
  source=()
  if [ -n "${FOVEAL_WHEELS:-}" ]; then source=(--no-index --find-links "$FOVEAL_WHEELS"); fi
  # What the runtime declares, except torch, which is $PYTHON's own, and what tests and bench add.
  mapfile -t packages < <("$venv/bin/python" - <<'END'
import tomllib
with open("runtime/pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
extras = project["optional-dependencies"]
names = {*project["dependencies"], *extras["frontend"], *extras["engine"]}
print("\n".join(sorted(name for name in names if not name.startswith("torch"))))
END
  )
  # Servers ask for the version of the runtime that is installed.
  runtime=./runtime
  if [ -n "${FOVEAL_WHEELS:-}" ]; then runtime=foveal-runtime; fi
  timeout 300 "$venv/bin/python" -m pip install -q "${source[@]}" "${packages[@]}" \
    psutil matplotlib pytest pytest-timeout pytest-asyncio pytest-xdist hypothesis || exit 1
  timeout 300 "$venv/bin/python" -m pip install -q --no-deps "${source[@]}" "$runtime" || exit 1
  FOVEAL_PYTHON=$venv/bin/python
fi
export PYTHONPATH=$PWD:$PWD/runtime/src:$PWD/operator/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export FOVEAL_CACHE=${FOVEAL_CACHE:-/tmp/foveal-bench} FOVEAL_DEVICE=cuda
unset TRITON_INTERPRET
if ! timeout 90 "$FOVEAL_PYTHON" -c 'import torch, triton; assert torch.cuda.is_available()'; then
  echo "gpu.sh: this Python's torch sees no GPU, or has no Triton" >&2
  exit 2
fi
{ date -u; nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
  git describe --always --dirty 2>/dev/null; } | tee "$OUT/machine.txt"

part() { # part NAME SECONDS COMMAND...: its output in $OUT/NAME.txt, never longer than SECONDS
  local name=$1 seconds=$2 began=$SECONDS code=0
  shift 2
  if [ "$wanted" != "  " ] && [ "${wanted/ $name /}" = "$wanted" ]; then return; fi
  echo "--- $name (at most $seconds s)"
  timeout -k 10 "$seconds" "$@" > "$OUT/$name.txt" 2>&1 || code=$?
  tail -n 12 "$OUT/$name.txt"
  echo "$name: exit $code after $((SECONDS - began)) s" | tee -a "$OUT/summary.txt"
}
# Each test as it ends: what a machine's time cuts off says how far it came.
tests="$FOVEAL_PYTHON -m pytest -v -p no:cacheprovider -W ignore --dist worksteal"
# What is only right or wrong runs side by side; what is timed has the GPU to itself.
part attention-tests 170 $tests -n 5 -m "not slow" tests/model/test_attention_triton.py &
part layer-tests 170 $tests -n 3 -m "not slow" tests/model/test_gpu_layers.py \
  tests/model/test_gpu_products.py tests/model/test_gpu_codes.py \
  tests/model/test_gpu_recurrence.py &
part architectures-fp32 170 $tests -n 4 -k test_equals_transformers tests/model/test_architectures.py &
part architectures-bf16 170 env FOVEAL_DTYPE=bfloat16 $tests -n 3 \
  -k "test_equals_transformers and (llama or gemma or qwen3 or llava or oss)" \
  tests/model/test_architectures.py &
wait
part attention 100 "$FOVEAL_PYTHON" -m e2e.bench.gpu.attention --sweep one --out "$OUT/attention.json"
part step 90 "$FOVEAL_PYTHON" -m e2e.bench.gpu.step --profile --out "$OUT/step.json"
part step-int4 90 "$FOVEAL_PYTHON" -m e2e.bench.gpu.step --quantization int4 \
  --out "$OUT/step-int4.json"
part step-hybrid 90 "$FOVEAL_PYTHON" -m e2e.bench.gpu.step --hybrid --profile \
  --out "$OUT/step-hybrid.json"
part first-token 60 "$FOVEAL_PYTHON" -m e2e.bench.gpu.ttft --out "$OUT/first-token.json"
part serving 80 "$FOVEAL_PYTHON" -m e2e.bench --servers foveal --device cuda --dtype bfloat16 \
  --model llava-small --traces hits-0,hits-95,text --requests 32 --rounds 1 --concurrency 8 \
  --out "$OUT" --label serving
if grep -v "exit 0 after" "$OUT/summary.txt"; then
  echo "gpu.sh: the parts above failed or were too slow to end; see $OUT" >&2
  exit 1
fi
echo "gpu.sh: all parts ran; results in $OUT"
