"""Imports put off at the start of an engine and of a media worker, in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.markdown import ROOT

HEAVY = """[m for m in (
    "torch._dynamo.eval_frame", "scipy.optimize._basinhopping", "sympy.core", "boto3",
    "accelerate.accelerator", "torch.distributed.tensor._api", "torch.distributed.fsdp.api",
    "torch.distributed.checkpoint", "torchvision.models.resnet", "torch.onnx",
    "torch.export.exported_program", "timm",
)"""
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
WORKER = """
import gc, socket, sys
from foveal_runtime.frontend.media import protocol, worker_main
from foveal_runtime.plan.config import ModalitiesConfig
ours, theirs = socket.socketpair()
link = worker_main.Link(ours)
link.send(protocol.Load("examples/tiny-vlm/model", b"n" * 16, ModalitiesConfig()))
ours.shutdown(socket.SHUT_WR)
assert worker_main.serve(worker_main.Link(theirs)) == 0
assert gc.isenabled()
print([m for m in ("torch._decomp", "torch._refs", "torch.export.unflatten") if m in sys.modules])
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
LATER = """
import torch
from foveal_runtime.telemetry import deferred
deferred.defer()
import sympy, torchvision.models
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental import symbolic_shapes as held
from torch.nn.attention.flex_attention import _DEFAULT_SPARSE_BLOCK_SIZE, BlockMask
whole, cut, other = Shard(0), Shard(1), Replicate()
assert not isinstance(torch.ones(1), (DTensor, BlockMask, sympy.Basic))
assert issubclass(int, DTensor) is False
asked = [(name, values) for name in deferred._OF_PLAIN_SIZES for values in (
    [(True,), (False,), (3,)] if name == "is_nested_int" else
    [(3, 3), (3, 4), ((1, 2), (1, 2)), ((1, 2), (1,))] if name == "sym_eq" else
    [(True, False), (True, True), (False, False), (True,)] if name in ("sym_and", "sym_or") else
    [(True,), (False,)])]
plain = [getattr(held, name)(*values) for name, values in asked]
sys = __import__("sys")
stand_in, sys.modules["sympy"] = sys.modules["sympy"], type(sys)("sympy")  # its import has begun
assert not isinstance(1, sympy.Basic)
sys.modules["sympy"] = stand_in
assert "sympy.core" not in sys.modules, "what is plain needs no sympy"
import torch.distributed.tensor.placement_types as real
assert isinstance(whole, real.Shard) and not isinstance(whole, real.Replicate)
assert (whole.dim, cut.dim) == (0, 1) and whole == real.Shard(0) and other == real.Replicate()
assert hash(whole) == hash(real.Shard(0)) and whole != cut
assert Shard is not real.Shard and isinstance(real.Shard(0), Shard)
import copy
assert copy.copy(whole) == whole and copy.deepcopy([whole, cut]) == [whole, cut]
from torch.distributed.tensor import DTensor as now
assert issubclass(now, DTensor) and not isinstance(torch.ones(1), DTensor)
symbols = deferred.real("torch.fx.experimental.symbolic_shapes")
assert plain == [getattr(symbols, name)(*values) for name, values in asked]
assert held.guard_or_false(a=True) is True, "as the real one takes it"
assert held.expect_true is symbols.expect_true, "also for those who hold on to the stand-in"
flex = deferred.real("torch.nn.attention.flex_attention")
assert flex._DEFAULT_SPARSE_BLOCK_SIZE == _DEFAULT_SPARSE_BLOCK_SIZE
assert issubclass(flex.BlockMask, BlockMask)
class Own(sympy.Basic):
    pass
assert Own.__mro__[1] is deferred.real("sympy").Basic
assert isinstance(sympy.Symbol("x"), sympy.Basic)
import accelerate.utils
assert accelerate.utils.get_max_memory({"cpu": 5}) == {"cpu": 5}
assert torchvision.models.resnet18.__name__ == "resnet18"
print("real")
"""
SUBCLASS = """
from foveal_runtime.telemetry import deferred
deferred.defer()
import sympy
class Marked(sympy.Basic):
    def __init_subclass__(cls, mark="", **options):
        cls.mark = mark
class Own(Marked, mark="given"):
    def shown(self):
        return super().func
assert Own().shown() is Own and Own.mark == "given"
assert Own.__mro__[2] is deferred.real("sympy").Basic
print("real")
"""
BELOW = """
import sys
from importlib import import_module
from foveal_runtime.telemetry.deferred import StandIn, defer
defer()
{first}
{last}
stood_in = [m for m in ("torch._dynamo", "torch._dynamo.utils") if "torch" in {first!r}]
assert not any(isinstance(sys.modules[m], StandIn) for m in stood_in)
print("real")
"""
LOADED = """
module = import_module("{0}")
assert module is import_module("{0}") is sys.modules["{0}"]
assert module.__spec__.origin == module.__file__, "as the import system left it"
"""
COMPILED = "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1)).item() == 2"
FLEX = """
from transformers.integrations.flex_attention import flex_attention_forward
q = torch.ones(1, 1, 8, 16)
assert flex_attention_forward(torch.nn.Module(), q, q, q, None)[0].shape == (1, 8, 1, 16)
"""
AT_ONCE = """
import sys, threading, time
from foveal_runtime.telemetry.deferred import StandIn, real
failed = []
threading.excepthook = lambda what: failed.append(what.exc_value)
def slowly(frame, event, value):  # between any two lines of it another thread may run
    if frame.f_code is real.__code__:
        time.sleep(0.001)
        return slowly
threading.settrace(slowly)
for _ in range(10):
    sys.modules["colorsys"] = StandIn("colorsys")
    barrier = threading.Barrier(4)
    def ask():
        barrier.wait()
        assert not isinstance(real("colorsys"), StandIn)
    threads = [threading.Thread(target=ask) for _ in range(4)]
    [t.start() for t in threads], [t.join() for t in threads]
print(failed)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_neither_an_engine_nor_a_worker_imports_what_only_compiling_needs() -> None:
    """More than a third of the modules that a start imported, and of its CPU time in a worker."""
    assert run(SERVED) == "[]"


def test_a_worker_does_not_learn_the_shapes_of_tensors_without_values() -> None:
    """A seventh of its CPU time until it is ready, and 17 MiB."""
    assert run(WORKER) == "[]"


def test_whoever_asks_for_more_gets_the_real_module() -> None:
    assert run(ASKED) == "real"


@pytest.mark.parametrize("code", [LATER, SUBCLASS])
def test_a_class_that_is_not_there_yet_is_the_real_one_once_it_is(code: str) -> None:
    assert run(code) == "real"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("import torch", COMPILED),
        ("import torch._dynamo.config", LOADED.format("torch._dynamo.config") + COMPILED),
        ("import torch._inductor.config", FLEX),
        ("import scipy.optimize._lsq", LOADED.format("scipy.optimize._lsq")),
    ],
)
def test_a_module_below_a_stand_in_is_the_real_one(first: str, last: str) -> None:
    assert run(BELOW.format(first=first, last=last)) == "real"


@pytest.mark.extended
def test_a_module_that_is_not_there_is_said_to_be_missing() -> None:
    asked = "try: import scipy.optimize.nothing\nexcept ModuleNotFoundError as e: print(e)"
    code = f"from foveal_runtime.telemetry.deferred import defer\ndefer()\n{asked}"
    assert run(code) == "No module named 'scipy.optimize.nothing'"


@pytest.mark.extended
def test_threads_that_ask_at_once_get_the_real_module() -> None:
    assert run(AT_ONCE) == "[]"
