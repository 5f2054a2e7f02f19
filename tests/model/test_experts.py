"""Experts in one call of the C kernel: plain, quantised at load, of every instruction set; compared
with sums in double, models with transformers' forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.blocked import block_layer
from foveal_runtime.model.checkpoint.experts import quantize_experts, quantized_experts
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu import experts as cpu_experts
from foveal_runtime.model.cpu import packing
from foveal_runtime.model.cpu.experts import PackedExperts, pack_experts
from foveal_runtime.model.cpu.kernels import DecoderKernel
from tests.support.models.compiled import NEEDS_KERNEL, params_of

pytestmark = NEEDS_KERNEL
NUM, USED = 7, 3
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Of the largest result: the order of sums; in bfloat16 what is rounded between two products."""
DTYPES = [torch.float32, torch.bfloat16]
ROWS = (1, 2, 3, 7, 20, 130)
SIZES = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
         "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip


@pytest.fixture(params=params_of("decoder_layers"))
def kernel(request, monkeypatch) -> DecoderKernel:
    """One after the other, each as if it were this machine's."""
    found = DecoderKernel(request.param)
    for module in (packing, cpu_experts):
        monkeypatch.setattr(module, "loaded_kernel", lambda: found)
    return found


def experts_of(width: int, inner: int, dtype: torch.dtype, act: str = "silu") -> Any:
    """Random ones of transformers'."""
    config = transformers.AutoConfig.for_model(
        "qwen3_moe", hidden_size=width, moe_intermediate_size=inner, num_experts=NUM,
        num_experts_per_tok=USED, hidden_act=act,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    made = Qwen3MoeExperts(config).to(dtype).requires_grad_(False)
    torch.manual_seed(width + inner)
    for weight in made.parameters():
        weight.normal_(0, 0.1)
    return made


def inputs(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    which = torch.stack([torch.randperm(NUM)[:USED] for _ in range(count)])
    return torch.randn(count, width).to(dtype), which, torch.rand(count, USED).to(dtype)


def by_hand(experts: Any, weights, rows, which, factors) -> torch.Tensor:
    """In double. `weights`: of each expert what gates, what is gated, and what comes last."""
    out = torch.zeros(len(rows), rows.shape[1], dtype=torch.float64)
    for row, some, factor, to in zip(rows.double(), which, factors.double(), out, strict=True):
        for number, times in zip(some.tolist(), factor, strict=True):
            gate, up, down = weights[number]
            to += times * (down @ (experts.act_fn(gate @ row) * (up @ row)))
    return out


def apart(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


def check_rows(computed, experts: Any, weights, width: int, dtype: torch.dtype) -> None:
    """Against double, and that a row's bits are its own, whatever else there is."""
    rows, which, factors = inputs(ROWS[-1], width, dtype)
    whole = computed(rows, which, factors)
    assert apart(whole, by_hand(experts, weights, rows, which, factors)) <= BOUND[dtype]
    for count in ROWS:
        assert torch.equal(computed(rows[:count], which[:count], factors[:count]), whole[:count])
    backwards = torch.arange(len(rows) - 1, -1, -1)
    other = computed(rows[backwards], which[backwards], factors[backwards])
    assert torch.equal(other[backwards], whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "inner", "act"),
    [(64, 32, "silu"), (96, 80, "gelu_pytorch_tanh"), (176, 48, "gelu"), (32, 64, "relu")],
)
def test_plain_experts(width, inner, act, dtype, kernel, monkeypatch) -> None:
    monkeypatch.setattr(cpu_experts, "has_fast_products", lambda _: True)
    monkeypatch.setattr(cpu_experts, "MOST_PAIRS", 64 * USED)  # several calls
    experts = experts_of(width, inner, dtype, act)
    weights = [
        (*both.double().chunk(2), down.double())
        for both, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
    ]
    holder = nn.ModuleDict({"experts": experts})
    assert pack_experts(holder) == 1
    packed = holder["experts"]
    held = [(one.numel(), one.dtype) for one in experts.parameters()]
    assert [(one.numel(), one.dtype) for one in packed.parameters()] == held
    check_rows(packed, experts, weights, width, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_experts(kind, dtype, kernel) -> None:
    experts = experts_of(128, 64, dtype)
    holder = nn.ModuleDict({"experts": copy.deepcopy(experts)})
    assert quantize_experts(holder, kind, block_layer) == 1
    (made,) = quantized_experts(holder)
    names = ("gate_proj", "up_proj", "down_proj")
    weights = [[one[name].dequantized().double() for name in names] for one in made]
    one_by_one = made(*(some := inputs(9, 128, dtype)))
    assert made.use_kernel(dtype)
    assert apart(made(*some), one_by_one.double()) <= 4 * BOUND[dtype]
    check_rows(made, experts, weights, 128, dtype)


def test_rows_of_a_type_that_the_kernel_lacks_are_computed_one_by_one() -> None:
    """float16, in which AWQ's files are: engines failed at their first step."""
    holder = nn.ModuleDict({"experts": experts_of(64, 32, torch.float16)})
    assert quantize_experts(holder, "int8", block_layer) == 1
    (made,) = quantized_experts(holder)
    rows, which, factors = inputs(3, 64, torch.float32)
    assert not made.use_kernel(torch.float16)
    out = made(rows.half(), which, factors.half())
    assert made.use_kernel(torch.float32)
    torch.testing.assert_close(out.float(), made(rows, which, factors), rtol=0.02, atol=0.02)
    torch.testing.assert_close(made(rows.half(), which, factors.half()), out)


def test_a_router_that_is_called_otherwise_keeps_its_modules(bench, checkpoints, monkeypatch):
    """MiniMax M2's takes a correction beside the rows: engines failed to start."""
    more = {"intermediate_size": 32, "num_local_experts": 4}
    sizes = {k: v for k, v in SIZES.items() if k not in ("num_experts", "moe_intermediate_size")}
    config = transformers.AutoConfig.for_model("minimax_m2", **sizes, **more)
    monkeypatch.setitem(checkpoints.CASES, "minimax_small", checkpoints.Case(lambda: config))
    one = bench("minimax_small", attention="auto")
    assert one.runner.forward.decoder_layers is None
    for job, prompt in jobs_of(one):
        one.check(job, prompt)


def test_blocks_of_another_width_are_computed_one_by_one() -> None:
    """96 outputs are laid out in blocks of 48, of which 64 hold no whole number."""
    holder = nn.ModuleDict({"experts": experts_of(96, 64, torch.float32)})
    assert quantize_experts(holder, "int8", block_layer) == 1
    (made,) = quantized_experts(holder)
    assert not made.use_kernel(torch.float32)
    assert made(*inputs(3, 96, torch.float32)).shape == (3, 96)


def test_experts_that_read_another_ones_weights_show() -> None:
    """The comparison must be able to fail."""
    experts = experts_of(64, 32, torch.float32)
    holder = nn.ModuleDict({"experts": experts})
    if not pack_experts(holder):
        pytest.skip("experts stay torch's on this machine")
    packed, some = holder["experts"], inputs(9, 64, torch.float32)
    assert apart(packed(*some), experts(*some).double()) < 1e-5
    packed.down_proj.data[[2, 5]] = packed.down_proj.data[[5, 2]]
    assert apart(packed(*some), experts(*some).double()) > 0.1


def test_an_expert_that_is_not_there_is_an_error() -> None:
    holder = nn.ModuleDict({"experts": experts_of(64, 32, torch.float32)})
    if not pack_experts(holder):
        pytest.skip("experts stay torch's on this machine")
    rows, which, factors = inputs(3, 64, torch.float32)
    for number in (NUM, -1):
        which[1, 1] = number
        with pytest.raises(RuntimeError, match="no such experts"):
            holder["experts"](rows, which, factors)


class Scaled(Qwen3MoeExperts):  # type: ignore[misc]
    """Says nothing of what it does more."""

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return 1.1 * super().forward(*given)


def test_experts_that_compute_something_else_stay_as_they_are() -> None:
    config = transformers.AutoConfig.for_model(
        "gpt_oss", hidden_size=64, intermediate_size=32, num_local_experts=4
    )
    config._experts_implementation = "grouped_mm"
    gates = GptOssExperts(config).requires_grad_(False)
    odd = experts_of(64, 40, torch.float32)
    half = experts_of(64, 32, torch.float16)
    scaled = experts_of(64, 32, torch.float32)
    scaled.__class__ = Scaled
    for one in gates.parameters():
        one.normal_(0, 0.1)
    given = [gates, odd, half, scaled]
    holder = nn.ModuleList(given)
    assert pack_experts(holder) == 0
    assert list(holder) == given


@pytest.fixture
def small(checkpoints, monkeypatch) -> str:
    config = transformers.AutoConfig.for_model("qwen3_moe", **SIZES)
    monkeypatch.setitem(checkpoints.CASES, "small", checkpoints.Case(lambda: config))
    return "small"


def jobs_of(one) -> list:
    prompts = [one.prompt(1, num_text=40), one.prompt(2, num_text=9)]
    jobs = [one.job(str(number), prompt) for number, prompt in enumerate(prompts)]
    one.driver.run(jobs)
    return list(zip(jobs, prompts, strict=True))


def test_a_model_with_packed_experts_equals_transformers(small, bench) -> None:
    one = bench(small, attention="auto")
    found = [m for m in one.runner.loaded.model.modules() if isinstance(m, PackedExperts)]
    if not packing.has_fast_products(torch.float32):
        pytest.skip("experts stay torch's on this machine")
    assert len(found) == SIZES["num_hidden_layers"]
    for job, prompt in jobs_of(one):
        one.check(job, prompt)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_are_quantised_at_load(kind, small, bench, tiny) -> None:
    one = bench(small, attention="auto", quantization=kind)
    model = one.runner.loaded.model
    found = quantized_experts(model)
    assert len(found) == SIZES["num_hidden_layers"]
    jobs = jobs_of(one)
    with pytest.raises(AssertionError):  # the comparison sees the rounding
        one.check(*jobs[0])
    for name, module in one.reference.named_modules():
        if isinstance(module, nn.Linear) and hasattr(model.get_submodule(name), "dequantized"):
            module.weight.data = model.get_submodule(name).dequantized()
        elif isinstance(module, Qwen3MoeExperts):
            mine = model.get_submodule(name)
            gate, up, down = (
                torch.stack([expert[f"{name}_proj"].dequantized() for expert in mine])
                for name in ("gate", "up", "down")
            )
            module.gate_up_proj.data, module.down_proj.data = torch.cat([gate, up], 1), down
    for job, prompt in jobs:
        one.check(job, prompt)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_quantised_experts_take_is_predicted(kind, small, tiny) -> None:
    """On GPUs they stay as they are."""
    path = str(tiny(small))
    predicted = profiler.predict(path, quantization=kind)
    assert predicted.weight_bytes == profiler.parameter_bytes(
        load_model(path, quantization=kind).model
    )
    stored = profiler.predict(path).weight_bytes
    on_gpu = profiler.predict(path, quantization=kind, device="cuda").weight_bytes
    assert predicted.weight_bytes < on_gpu < stored


def test_llama_4s_experts_are_quantised(bench, checkpoints, monkeypatch) -> None:
    """They compute tokens as transformers' do, and by their layers one after another."""
    more = {
        "num_local_experts": 2,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 12,
        "floor_scale": 8,
    }
    sizes = {k: v for k, v in SIZES.items() if "experts" not in k and "moe" not in k}
    config = transformers.AutoConfig.for_model("llama4_text", **sizes, **more)
    monkeypatch.setitem(checkpoints.CASES, "llama4_small", checkpoints.Case(lambda: config))
    one = bench("llama4_small", attention="auto", quantization="int8")
    (found,) = quantized_experts(one.runner.loaded.model)
    rows = torch.randn(6, 64)
    goes = torch.arange(6)[:, None] % 2 == 0
    given = torch.cat([rows * goes, rows * ~goes])
    out = found(given)
    for number, expert in enumerate(found):
        gate, up, down = (expert[f"{n}_proj"].dequantized() for n in ("gate", "up", "down"))
        some = given.unflatten(0, (2, -1))[number]
        wanted = (nn.functional.silu(some @ gate.t()) * (some @ up.t())) @ down.t()
        torch.testing.assert_close(out.unflatten(0, (2, -1))[number], wanted, rtol=1e-4, atol=1e-5)
