"""Attention of encoders: the kernel against float64, what it leaves to torch, and who uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from foveal_runtime.engine.types.step import EncoderInput
from foveal_runtime.model.attention.dense import (
    DENSE_NAME,
    REPLACED_NAME,
    attend,
    dense_attention,
    switch_towers,
)
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu.kernels import PrefillKernel, load_prefill_kernel
from foveal_runtime.model.device import Device
from foveal_runtime.model.runner.encoder import EncoderRunner, EncoderStore
from tests.support.models.bench import pack
from tests.support.models.compiled import params_of

KERNEL = load_prefill_kernel()
pytestmark = pytest.mark.skipif(isinstance(KERNEL, str), reason=f"{KERNEL}; run `make setup`")
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT32: 2e-5, BFLOAT16: 8e-3}


class Calls(TorchFunctionMode):
    """Counts the calls of torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def separate(batch: int, tokens: int, heads: int, dim: int) -> torch.Tensor:
    """As most towers have them: heads side by side in a token's row."""
    return torch.randn(batch, tokens, heads, dim).transpose(1, 2)


def joined(batch: int, tokens: int, heads: int, dim: int) -> torch.Tensor:
    """One of the three that one product makes."""
    return torch.randn(batch, tokens, 3, heads, dim)[:, :, 1].transpose(1, 2)


def by_heads(batch: int, tokens: int, heads: int, dim: int) -> torch.Tensor:
    """As Whisper has them."""
    return torch.randn(batch, heads, tokens, dim)


def by_numbers(batch: int, tokens: int, heads: int, dim: int) -> torch.Tensor:
    """A head's numbers do not lie side by side."""
    return torch.randn(batch, heads, dim, tokens).transpose(2, 3)


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float | None = None):
    q, k, v = (one.double() for one in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float | None = None,
    kernel: PrefillKernel | None = None,
) -> None:
    got = attend(kernel or KERNEL, q, k, v, scaling)
    assert got.is_contiguous()
    assert got.dtype == q.dtype
    bound = TOLERANCE[q.dtype]
    torch.testing.assert_close(got.double(), wanted(q, k, v, scaling), atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("dim", [4, 12, 16, 40, 64, 72, 80, 88, 96, 104, 128, 250, 256])
@pytest.mark.parametrize("path", params_of("paged_prefill"))
def test_head_sizes(path: Path, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    kernel = PrefillKernel(path)
    for tokens in (1, 5, 64, 65, 200):
        check(*(separate(2, tokens, 3, dim).to(dtype) for _ in range(3)), kernel=kernel)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize("layout", [separate, joined, by_heads, by_numbers])
def test_layouts_batches_and_scalings(layout: Callable, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    for batch, scaling in ((1, None), (3, 1.0), (2, 0.2)):
        q, k, v = (layout(batch, 97, 4, 72) for _ in range(3))
        # `.to` would lay them out otherwise: the same views, of numbers that fit both dtypes.
        check(*(one if dtype == FLOAT32 else narrow(one) for one in (q / 4, k / 4, v)), scaling)


def narrow(rows: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(rows.shape, rows.stride(), dtype=BFLOAT16)
    return out.copy_(rows)


def test_shared_keys_and_keys_of_another_length() -> None:
    torch.manual_seed(2)
    for num_queries, num_keys in ((7, 150), (150, 7), (1, 300)):
        k, v = (separate(2, num_keys, 2, 64) for _ in range(2))
        check(separate(2, num_queries, 6, 64), k, v)


def test_large_scores_and_distant_peaks() -> None:
    torch.manual_seed(3)
    q, k, v = (separate(1, 200, 2, 64) for _ in range(3))
    k[:, :, 150] *= 40
    check(q * 8, k, v)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_bits_depend_on_neighbours_and_threads_not_at_all(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    q, k, v = (separate(3, 230, 4, 80).to(dtype) for _ in range(3))
    threads = torch.get_num_threads()
    together = attend(KERNEL, q, k, v, None)
    try:
        torch.set_num_threads(1)
        assert torch.equal(attend(KERNEL, q, k, v, None), together)
    finally:
        torch.set_num_threads(threads)
    for one in range(3):
        only = slice(one, one + 1)
        assert torch.equal(attend(KERNEL, q[only], k[only], v[only], None)[0], together[one])
    some = attend(KERNEL, q[:, :, 31:107], k, v, None)
    assert torch.equal(some, together[:, 31:107]), "of a query: of the others' number, too"


class Layer(torch.nn.Module):
    is_causal = False


def qkv(dtype: torch.dtype = FLOAT32, dim: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [separate(2, 20, 4, dim).to(dtype) for _ in range(3)]


def cases() -> dict[str, tuple[list[torch.Tensor], dict]]:
    """What the kernel does not compute."""
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    bias = torch.randn(1, 4, 20, 20)
    learned = [qkv()[0][:1], *qkv()[1:]]
    longer = [*qkv()[:2], torch.randn(2, 20, 4, 24).transpose(1, 2)]
    return {
        "mask": (qkv(), {"attention_mask": mask}),
        "bias": (qkv(), {"position_bias": bias}),
        "causal": (qkv(), {"is_causal": True}),
        "dropout": (qkv(), {"dropout": 1.0}),
        "float16": (qkv(torch.float16), {}),
        "float64": (qkv(torch.float64), {}),
        "odd heads": (qkv(dim=15), {}),
        "large heads": (qkv(dim=272), {}),
        "one sequence of queries": (learned, {}),
        "longer values": (longer, {}),
        "gradients": ([one.requires_grad_() for one in qkv()], {}),
        "another device": ([one.to("meta") for one in qkv()], {}),
    }


@pytest.mark.parametrize("name", cases())
def test_the_rest_is_torch_as_before(name: str) -> None:
    tensors, options = cases()[name]
    options = {"attention_mask": None, **options}
    with Calls() as calls:
        got, _ = dense_attention(Layer(), *tensors, **options)
    assert calls.count == 1
    before, _ = AttentionInterface()[REPLACED_NAME](Layer(), *tensors, **options)
    assert got.shape == before.shape
    assert got.is_meta or torch.equal(got, before)
    assert got.requires_grad == before.requires_grad


def test_a_layer_that_does_not_say_is_causal() -> None:
    with Calls() as calls:
        dense_attention(torch.nn.Module(), *qkv(), None)
        assert calls.count == 1
        dense_attention(torch.nn.Module(), *qkv(), None, is_causal=False)
        dense_attention(Layer(), *qkv(), None, output_attentions=False)
    assert calls.count == 1


FAMILIES = {
    "CLIP": "llava",
    "SigLIP": "gemma3",
    "windows": "qwen2_5_vl",
    "deepstack": "qwen3_vl",
    "InternVL": "internvl",
    "Whisper": "voxtral",
}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
@torch.inference_mode()
def test_towers_use_it_and_say_the_same(name: str, tiny, checkpoints) -> None:
    loaded = load_model(str(tiny(name)))
    store = EncoderStore(Device(torch.device("cpu")))
    runner = EncoderRunner(loaded, store, Device(torch.device("cpu")))
    inputs = []
    for modality, make in checkpoints.CASES[name].items.items():
        for item in (make(1), make(2)):
            value = pack(item)
            key = hashlib.sha256(value).digest()
            num_embeds = sum(count for _, count in item.embed_runs)
            inputs.append(EncoderInput(key, modality, num_embeds, value))

    def encode() -> tuple[int, list[torch.Tensor]]:
        with Calls() as calls:
            runner.encode(inputs)
        found = [store.lookup(one.mm_hash) for one in inputs]
        assert all(one is not None for one in found), store.failures_of(i.mm_hash for i in inputs)
        return calls.count, found

    count, ours = encode()
    assert count == 0, "torch's attention still runs"
    switched = [
        m for m in loaded.core.modules()
        if getattr(getattr(m, "config", None), "_attn_implementation", "") == DENSE_NAME
    ]  # fmt: skip
    for module in switched:
        module.config._attn_implementation = REPLACED_NAME
    count, before = encode()
    assert count > 0
    for one, other in zip(ours, before, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    assert switch_towers(loaded.core, loaded.decoder) > 0, "and back"
    assert encode()[0] == 0
