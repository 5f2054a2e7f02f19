"""Fused norms and MLPs compute what the modules of transformers compute; anything else stays."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPMLP, CLIPVisionConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu import fusing
from foveal_runtime.model.cpu.fusing import QUICK_GELU, activation_of, fuse, fused_mlp, fused_norm
from foveal_runtime.model.cpu.kernels import (
    RowKernels,
    load_kernel,
    load_row_kernels,
    preferred_variants,
)
from foveal_runtime.model.cpu.packing import Activation, can_pack, pack_linears
from tests.support.models.compiled import NEEDS_PACKING, paths_of

pytestmark = [
    NEEDS_PACKING,
    pytest.mark.skipif(isinstance(load_row_kernels(), str), reason=str(load_row_kernels())),
]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def row_kernels() -> RowKernels:
    found = load_row_kernels()
    assert isinstance(found, RowKernels)
    return found


def norm(kind, width, dtype):
    torch.manual_seed(width)
    module = kind(width, eps=1e-6)
    module.weight.data = torch.randn(width)
    return module.to(dtype).eval()


def all_kernels() -> list[RowKernels]:
    return [RowKernels(path) for path in paths_of("rows")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("width", [8, 37, 96, 768])
def test_a_norm_is_the_same(kind, width, dtype):
    module = norm(kind, width, dtype)
    for kernel in all_kernels() or [row_kernels()]:
        fused = fused_norm(module, kernel)
        assert fused is not None
        for shape in [(1, 0, width), (1, 1, width), (2, 5, 3, width), (1, 300, width)]:
            rows = 4 * torch.randn(*shape).to(dtype) - 1
            wanted, got = module(rows), fused(rows)
            assert (got.dtype, got.shape) == (dtype, wanted.shape)
            # In bfloat16 a last bit, where the order of sums decides the rounding.
            tolerance = 2e-6 if dtype == torch.float32 else 2**-7
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance / 100)
            if dtype == torch.bfloat16 and rows.numel() > 1000:
                assert (got == wanted).float().mean() > 0.99


def test_what_is_not_finite_stays_so():
    module = norm(LlamaRMSNorm, 32, torch.bfloat16)
    fused = fused_norm(module, row_kernels())
    rows = torch.ones(3, 32, dtype=torch.bfloat16)
    rows[0, 3], rows[1, 3] = float("nan"), float("inf")
    wanted, got = module(rows), fused(rows)
    assert torch.equal(wanted.isnan(), got.isnan())
    assert got[0].isnan().all()
    assert not got[2].isnan().any()


def test_rows_with_gaps_and_other_dtypes_take_the_old_way():
    module = norm(LlamaRMSNorm, 32, torch.float32)
    fused = fused_norm(module, row_kernels())
    gaps = torch.randn(7, 64)[:, ::2]
    assert torch.equal(fused(gaps), module(gaps))
    half = torch.randn(7, 32).bfloat16()
    assert torch.equal(fused(half), module(half))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_rms_norm_stays(dtype):
    class Shifted(LlamaRMSNorm):
        def forward(self, rows):
            return super().forward(rows) + 0.1

    class Centred(LlamaRMSNorm):
        def forward(self, rows):
            return super().forward(rows - rows.mean(-1, keepdim=True))

    class Grouped(LlamaRMSNorm):
        """Takes rows with a dimension more, and cannot be tried with plain ones."""

        def forward(self, rows):
            batch, _groups, _positions, width = rows.shape
            return super().forward(rows.reshape(batch, -1, width)).view(rows.shape)

    for module in (
        nn.LayerNorm(64),
        nn.LayerNorm(64, bias=False),
        norm(Shifted, 64, dtype),
        norm(Centred, 64, dtype),
        norm(Grouped, 64, dtype),
    ):
        assert fused_norm(module.to(dtype), row_kernels()) is None, module


class Scaled(LlamaMLP):
    factor = 1.1

    def forward(self, rows):
        return super().forward(rows) * self.factor


class Swapped(LlamaMLP):
    def forward(self, rows):
        return self.down_proj(self.act_fn(self.up_proj(rows)) * self.gate_proj(rows))


def llama(kind, activation, dtype):
    config = LlamaConfig(
        hidden_size=48, num_attention_heads=4, intermediate_size=112, hidden_act=activation
    )
    return kind(config).to(dtype).eval()


def clip(activation, dtype):
    config = CLIPVisionConfig(
        hidden_size=48, num_attention_heads=4, intermediate_size=112, hidden_act=activation
    )
    return CLIPMLP(config).to(dtype).eval()


def mlps(dtype):
    for activation in ("silu", "gelu", "gelu_pytorch_tanh", "relu"):
        yield llama(LlamaMLP, activation, dtype)
    for activation in ("quick_gelu", "gelu", "gelu_pytorch_tanh", "relu", "silu"):
        yield clip(activation, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_mlp_is_the_same(dtype):
    torch.manual_seed(2)
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    for kernel in all_kernels():
        for module in mlps(dtype):
            rows = 3 * torch.randn(1, 700, 48).to(dtype)
            wanted = module(rows)
            pack_linears(module)
            fused = fused_mlp(module, kernel, {})
            assert fused is not None, module
            got = fused(rows)
            most = float(wanted.abs().max())
            tolerance = 1e-5 if dtype == torch.float32 else 2**-6
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * most)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_such_mlp_stays(dtype):
    torch.manual_seed(2)
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    others = [
        llama(Scaled, "silu", dtype),
        llama(Swapped, "silu", dtype),
        llama(LlamaMLP, "quick_gelu", dtype),
        llama(LlamaMLP, "tanh", dtype),
        clip("mish", dtype),
        nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)).to(dtype),
    ]
    for module in others:
        pack_linears(module)
        assert fused_mlp(module, row_kernels(), {}) is None, module
    plain = llama(LlamaMLP, "silu", dtype)
    assert fused_mlp(plain, row_kernels(), {}) is None  # nothing is packed


def test_each_setting_of_a_class_is_tried():
    torch.manual_seed(2)
    plain, scaled = (llama(Scaled, "silu", torch.float32) for _ in range(2))
    plain.factor, scaled.factor = 1.0, 1.1
    known: dict[object, bool] = {}
    for module, is_fused in [(plain, True), (scaled, False), (plain, True)]:
        pack_linears(module)
        assert (fused_mlp(module, row_kernels(), known) is not None) == is_fused


def test_activations_are_known_by_what_they_compute():
    found = {name: activation_of(ACT2FN[name]) for name in ("silu", "swish", "gelu", "gelu_new")}
    assert found == {
        "silu": Activation("swish"),
        "swish": Activation("swish"),
        "gelu": Activation("gelu", "none"),
        "gelu_new": Activation("gelu", "tanh"),
    }
    assert activation_of(ACT2FN["quick_gelu"]) is QUICK_GELU
    assert activation_of(nn.Identity()) == Activation("none")
    for name in ("tanh", "sigmoid", "mish", "gelu_10", "laplace"):
        assert activation_of(ACT2FN[name]) is None, name


def test_the_bundled_model_is_fused_and_works_without_the_kernels(monkeypatch):
    path = str(Path(__file__).parents[2] / "examples/tiny-vlm/model")
    model = load_model(path).model
    fused = [m for m in model.modules() if "forward" in vars(m)]
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert norms
    assert set(map(id, norms)) <= set(map(id, fused))
    assert any(type(m).__name__ == "LlamaMLP" for m in fused)
    monkeypatch.setattr(fusing, "load_row_kernels", lambda: "none here")
    model = load_model(path).model
    fused = [m for m in model.modules() if "forward" in vars(m)]
    assert {type(m).__name__ for m in fused} & {"LlamaRMSNorm"} == set()
    assert any(type(m).__name__ == "LlamaMLP" for m in fused)


def test_fusing_leaves_the_random_state_alone():
    module = norm(LlamaRMSNorm, 16, torch.float32)
    before = torch.random.get_rng_state()
    assert fuse(module) == (1, 0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_no_fitting_object(tmp_path):
    assert "no rows_" in str(load_row_kernels(tmp_path))
    (tmp_path / f"rows_{preferred_variants()[0]}.so").write_text("junk")
    assert "cannot be loaded" in str(load_row_kernels(tmp_path))
    assert "no paged_decode" in str(load_kernel(tmp_path))
