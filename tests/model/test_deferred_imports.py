"""Imports put off at the start of an engine and of a media worker, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

from tests.support.markdown import ROOT

HEAVY = '[m for m in ("torch._dynamo.eval_frame", "scipy.optimize._basinhopping")'
SERVED = f"""
import sys, io
from PIL import Image
from foveal_runtime.main.engine import load_engine
from foveal_runtime.frontend.media.worker_main import load_processor
from foveal_runtime.frontend.media.protocol import Load
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModalitiesConfig, ModelConfig
path = "examples/tiny-vlm/model"
caches = EngineCaches(kv_bytes=16 << 20, kv_touched=False)
load_engine(EngineConfig(model=ModelConfig(path=path), caches=caches, num_threads=1))
worker = load_processor(Load(path, b"", ModalitiesConfig()))
worker.examine(b"")
data = open("examples/tiny-vlm/images/digit-7.png", "rb").read()
assert worker.process(0, worker.decode(0, memoryview(data), {{}}), {{}})
print({HEAVY} if m in sys.modules])
"""
ASKED = """
from foveal_runtime.telemetry.deferred import StandIn, defer
defer()
import torch, transformers.masking_utils
from torchvision.ops.roi_align import is_compile_supported
import transformers.loss.loss_for_object_detection as loss
assert isinstance(torch._dynamo, StandIn)
assert torch.compiler.disable(len) is len
rows, columns = loss.linear_sum_assignment([[4, 1], [2, 8]])
assert list(columns) == [1, 0]
assert is_compile_supported("cpu") in (True, False)
mode = transformers.masking_utils.TransformGetItemToIndex()
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert type(mode) is TransformGetItemToIndex
assert not isinstance(torch._dynamo, StandIn)
assert torch._dynamo.config.recompile_limit
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
defer()
assert not isinstance(torch._dynamo, StandIn), "what is there stays"
print("real")
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_neither_an_engine_nor_a_worker_imports_what_only_compiling_needs() -> None:
    """They took a third of the CPU time of a start, and 125 MB in each process."""
    assert run(SERVED) == "[]"


def test_whoever_asks_for_more_gets_the_real_module() -> None:
    assert run(ASKED) == "real"
