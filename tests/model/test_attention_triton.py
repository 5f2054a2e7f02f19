"""The Triton kernels against the torch backend, over what models ask of attention.

Without a GPU they run in Triton's interpreter, a Python call for each operation of each program:
shapes are small and odd. FOVEAL_DEVICE=cuda compiles them.
"""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foveal_runtime.model.attention import BackendRequest, LayerGeometry, create_backend
from foveal_runtime.plan.errors import StartupError
from tests.support.models.attention_batches import (
    DEVICE,
    batch,
    geometry,
    on_device,
    wanted,
)

pytest.importorskip("triton")
from tests.support.models.triton_compile import SMALL_CARD_BYTES, compiled

kernels = importlib.import_module("foveal_runtime.model.attention.triton.kernels")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
MIXED = [(1, 1), (1, 37), (9, 21), (3, 14), (6, 6)]
DECODE = [(1, 1), (1, 19), (1, 50)]
DTYPES = [torch.float32, torch.bfloat16]


def make(layer: LayerGeometry, dtype: torch.dtype, block_size: int = 8, **tuning):
    request = BackendRequest((layer,), block_size, dtype, DEVICE)
    backend = create_backend("triton", request)
    backend.tuning = replace(backend.tuning, **tuning)
    return backend


def attend(layer, context, query, sinks=None, **tuning) -> torch.Tensor:
    backend = make(layer, query.dtype, context.pool.block_size, **tuning)
    there = None if sinks is None else sinks.to(DEVICE)
    return backend.attend(layer, query.to(DEVICE), on_device(context), there).cpu()


def compare(
    layer: LayerGeometry,
    lengths: list[tuple[int, int]] = MIXED,
    dtype: torch.dtype = torch.float32,
    *,
    block_size: int = 8,
    sinks: torch.Tensor | None = None,
    groups: list[int] | None = None,
    seed: int = 0,
    **tuning,
) -> None:
    context, query = batch(layer, lengths, block_size, dtype, seed, groups)
    got = attend(layer, context, query, sinks, **tuning)
    assert got.dtype == dtype
    want = wanted(layer, query, context, sinks)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_a_mixed_batch(dtype: torch.dtype) -> None:
    compare(geometry(32, 3), dtype=dtype)


@pytest.mark.parametrize(("dim", "group"), [(64, 1), (80, 7), (128, 4), (256, 2)])
def test_head_sizes_and_groups(dim: int, group: int) -> None:
    """80 is no power of two, 7 heads of a group fill no tile."""
    compare(geometry(dim, group, kv_heads=1), [(1, 19), (5, 9)], torch.bfloat16, seed=dim)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 48, 64, 72, 96, 112, 128, 160, 192, 256])
def test_all_head_sizes_and_groups(dim: int, dtype: torch.dtype) -> None:
    for group in (1, 2, 3, 5, 7, 8, 48):
        compare(geometry(dim, group), dtype=dtype, seed=dim + group)


def test_a_group_wider_than_a_tile_is_cut() -> None:
    compare(geometry(16, 40, kv_heads=1), [(1, 9), (5, 7)], decode_heads=16, prefill_rows=32)


def test_keys_and_values_of_different_width() -> None:
    """Latent attention, expanded: keys 24 wide, values 20."""
    compare(LayerGeometry(0, 4, 4, 24, 20, 0.2))


OPTIONS = [
    {"sliding_window": 5},
    {"softcap": 3.0},
    {"chunk_size": 16},
    {"scaling": 0.7},
    {"softcap": 20.0, "sliding_window": 13},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_chunks_softcap_scaling(options: dict) -> None:
    compare(geometry(16, 2, **options), block_size=16 if "softcap" in options else 8)
    compare(geometry(16, 2, **options), DECODE, torch.bfloat16, max_splits=1)


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_a_layer_without_its_rule_says_something_else(options: dict) -> None:
    """The negative control: a kernel that ignores the rule would be seen."""
    layer, plain = geometry(16, 2, **options), geometry(16, 2)
    context, query = batch(layer, MIXED, 8, torch.float32)
    difference = attend(plain, context, query) - wanted(layer, query, context)
    assert difference.abs().max() > 0.05


@pytest.mark.parametrize("max_splits", [1, 4])
@pytest.mark.parametrize("strength", [-50.0, 3.0, 400.0])
def test_sinks(strength: float, max_splits: int) -> None:
    layer = geometry(16, 4, kv_heads=1, has_sinks=True, sliding_window=12)
    sinks = torch.linspace(-1, 1, layer.num_heads) + strength
    compare(layer, [(1, 37), (5, 9)], sinks=sinks, max_splits=max_splits)
    if strength == 3.0:
        context, query = batch(layer, DECODE, 8, torch.float32)
        difference = attend(layer, context, query) - wanted(layer, query, context, sinks)
        assert difference.abs().max() > 0.05


GROUPED = [(12, 30), (1, 9), (4, 7), (3, 3)]
GROUPS = [-1, 0, 0, 0, 0, 0, 0, 0, -1, 1, 1, -1, 5, -1, 3, 3, 3, -1, -1, -1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 4},
        {"sliding_window": 4, "groups_ignore_window": True},
        {"chunk_size": 8},
    ],
    ids=str,
)
def test_bidirectional_groups(options: dict) -> None:
    """Tokens of one item see each other; a short chunk with a group is not decoded row by row."""
    layer = geometry(16, 2, **options)
    compare(layer, GROUPED, groups=GROUPS, prefill_rows=32)
    context, query = batch(layer, GROUPED, 8, torch.float32, groups=GROUPS)
    causal = attend(layer, replace(context, groups=None), query)
    assert (causal - wanted(layer, query, context)).abs().max() > 0.05


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_and_no_splits_agree(dtype: torch.dtype) -> None:
    """Spans are cut differently and some are empty; long contexts take several tiles."""
    layer = geometry(16, 3, kv_heads=1)
    lengths = [(1, 1), (1, 200), (1, 33)]
    for splits in (1, 2, 8):
        compare(layer, lengths, dtype, max_splits=splits, programs_each=64, decode_tile_bytes=512)


@pytest.mark.parametrize("max_splits", [4, 8, 16])
@pytest.mark.parametrize("length", [5, 190])
def test_few_and_many_spans_are_joined(length: int, max_splits: int) -> None:
    """Up to as many as are joined in one way, and more; some of them empty."""
    layer, sinks = geometry(32, 2, kv_heads=1), torch.tensor([0.5, -1.0])
    backend = make(layer, torch.float32, max_splits=max_splits)
    assert backend.tuning.num_splits(1) == max_splits
    compare(layer, [(1, length)], sinks=sinks, max_splits=max_splits, decode_tile_bytes=2048)


def test_extreme_scores_do_not_overflow() -> None:
    layer = geometry(16, 2, scaling=50.0)
    context, query = batch(layer, MIXED, 8, torch.float32)
    want = wanted(layer, query, context)
    torch.testing.assert_close(attend(layer, context, query), want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("pool_dtype", "given"), [(torch.float32, torch.float32),
                                                   (torch.bfloat16, torch.float32)])  # fmt: skip
def test_keys_and_values_are_written_where_slots_say(pool_dtype, given) -> None:
    layer = LayerGeometry(0, 6, 3, 24, 20, 0.2)
    context, _ = batch(layer, [(1, 40), (2, 7), (5, 5)], 8, pool_dtype)
    there = on_device(context)
    before = context.pool.keys[0].clone()
    key = torch.randn(3, 8, 24).to(given).transpose(0, 1).to(DEVICE)  # as decoders give them
    value = torch.randn(8, 3, 20).to(given).to(DEVICE)
    make(layer, pool_dtype).write_kv(layer, key, value, there)
    keys, values = there.pool.keys[0].cpu(), there.pool.values[0].cpu()
    # The interpreter cuts where hardware rounds: one unit of the last place.
    tolerance = 0.0 if pool_dtype == given else 2**-7
    for got, want in ((keys[context.slots], key), (values[context.slots], value)):
        torch.testing.assert_close(got.to(given), want.cpu(), atol=0, rtol=tolerance)
    others = torch.ones(len(before), dtype=torch.bool)
    others[context.slots] = False
    assert torch.equal(keys[others], before[others])


def test_values_that_are_not_side_by_side() -> None:
    layer = geometry(16, 2)
    context, query = batch(layer, MIXED, 8, torch.float32)
    spread = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert spread.stride(2) != 1
    torch.testing.assert_close(attend(layer, context, spread), attend(layer, context, query))


@pytest.mark.parametrize("num_tokens", [9, 17, 40])
def test_every_tensor_begins_where_vectors_are_loaded(num_tokens: int, monkeypatch) -> None:
    """Regression: half of a tensor of tiles began there or not, by their number, and Triton
    compiled the kernel once more beside running streams: 0.4 s on an H200."""
    begins = []

    class Watched:
        def __init__(self, kernel) -> None:
            self._kernel = kernel

        def __getitem__(self, grid):
            def launch(*args, **options) -> None:
                begins.extend(a.data_ptr() % 16 for a in args if isinstance(a, torch.Tensor))
                self._kernel[grid](*args, **options)

            return launch

    for name in ("prefill_kernel", "decode_kernel", "reduce_kernel"):
        monkeypatch.setattr(kernels, name, Watched(getattr(kernels, name)))
    layer = geometry(16, 3, kv_heads=1)
    compare(layer, [(num_tokens, num_tokens), (1, 30), (2, 9)], prefill_rows=32)
    assert len(begins) > 20
    assert set(begins) == {0}


@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 10_000))
def test_any_batch(seed: int) -> None:
    check_any_batch(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_many_batches(seed: int) -> None:
    check_any_batch(seed)


def check_any_batch(seed: int) -> None:
    """Lengths, shapes, rules and cuts drawn from the seed."""
    draw = random.Random(seed)
    lengths = [(q, q + draw.choice([0, 0, 3, 20]) + draw.randrange(9))
               for q in draw.choices([1, 1, 2, 4, 5, 11], k=draw.randint(1, 4))]  # fmt: skip
    groups = None
    if draw.random() < 0.5:
        groups = []
        for q, _ in lengths:
            cut = sorted(draw.choices(range(q + 1), k=2))
            groups += [-1] * cut[0] + [len(groups)] * (cut[1] - cut[0]) + [-1] * (q - cut[1])
    layer = geometry(
        draw.choice([16, 24, 32]),
        draw.choice([1, 2, 3, 5]),
        draw.choice([1, 2]),
        sliding_window=draw.choice([None, None, 1, 4, 11]),
        softcap=draw.choice([None, None, 2.0]),
        chunk_size=draw.choice([None, None, 8]),
        groups_ignore_window=draw.random() < 0.5,
    )
    compare(
        layer, lengths, draw.choice(DTYPES), block_size=draw.choice([4, 16]), groups=groups,
        sinks=torch.randn(layer.num_heads, generator=torch.Generator().manual_seed(seed))
        if draw.random() < 0.4 else None,
        seed=seed, max_splits=draw.choice([1, 2, 4]), prefill_rows=draw.choice([16, 32, 128]),
        decode_tile_bytes=draw.choice([256, 1024, 16384]),
    )  # fmt: skip


def test_what_it_cannot_compute_is_refused() -> None:
    wide = (LayerGeometry(0, 4, 2, 320, 128, 0.1),)
    with pytest.raises(StartupError, match=r"layers \[0\].*wider than 256"):
        create_backend("triton", BackendRequest(wide, 16, torch.float32, DEVICE))
    double = (geometry(64, 2),)
    with pytest.raises(StartupError, match="float64"):
        create_backend("triton", BackendRequest(double, 16, torch.float64, DEVICE))


@pytest.mark.extended
def test_a_cpu_without_the_interpreter_is_refused() -> None:
    code = (
        "import torch\n"
        "from foveal_runtime.model.attention import *\n"
        "from foveal_runtime.plan.errors import StartupError\n"
        "try:\n"
        "    create_backend('triton', BackendRequest((), 16, torch.float32, torch.device('cpu')))\n"
        "except StartupError as error:\n"
        "    print(error.message)\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "cannot run on cpu; use 'auto'" in done.stdout, done.stderr


SLOW_MODELS = [
    "gpt_oss_sinks",
    "llama4_text",
    "deepseek_v3_mla",
    "gemma3",
    "paligemma2",
    "qwen3_vl",
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    ["gemma2_softcap", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_MODELS)],
)
def test_a_whole_model_says_the_same(name: str, bench) -> None:
    """Windows, soft caps, sinks, chunks, latent attention, groups: through the real runner."""
    one = bench(name, attention="triton")
    items = [(kind, 7 + kind) for kind in one.case.items]
    prompts = {"a": one.prompt(1, items, num_text=20), "b": one.prompt(2, num_text=3)}
    jobs = {key: one.job(key, prompt) for key, prompt in prompts.items()}
    one.driver.run(list(jobs.values()))
    for key, job in jobs.items():
        one.check(job, prompts[key])


def test_kernels_compile_without_a_gpu() -> None:
    """Regression: a name that the interpreter lets change its shape in a loop did not compile."""
    found = compiled("bfloat16,128,4,90,rules", "bfloat16/fp8,128,4,89,rules")
    assert [one["kernel"] for one in found] == 2 * [
        "decode_kernel", "decode_kernel", "prefill_kernel", "reduce_kernel", "write_kernel"
    ]  # fmt: skip
    assert max(one["shared_bytes"] for one in found) <= SMALL_CARD_BYTES
    decode, decode_whole, prefill, reduction, writing = (one["before_wait"] for one in found[:5])
    # What starts early looks up which token it has, and nothing that this step's kernels write.
    assert decode == decode_whole == 3 * ["ld.global.b32"]
    assert reduction == []
    # Other kernels, and all on cards that cannot start them early, start as ever.
    assert {prefill, writing, *(one["before_wait"] for one in found[5:])} == {None}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", [80, 89, 90])
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
def test_kernels_compile_for_all_head_sizes(kind: str, architecture: int) -> None:
    cases = [f"{kind},{dim},{group},{architecture},{rules}" for dim in (64, 80, 128, 192, 256)
             for group in (1, 7) for rules in ("plain", "rules")]  # fmt: skip
    found = compiled(*cases)
    assert max(one["shared_bytes"] for one in found) <= SMALL_CARD_BYTES
