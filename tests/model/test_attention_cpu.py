"""The compiled kernels against the torch backend, over what models ask of attention."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foveal_runtime.model.attention import (
    BackendRequest,
    ForwardContext,
    LayerGeometry,
    create_backend,
)
from foveal_runtime.model.attention import cpu as cpu_module
from foveal_runtime.model.attention.cpu import CpuBackend, divide
from foveal_runtime.model.cpu import kernels
from foveal_runtime.model.cpu.kernels import (
    Kernel,
    PrefillKernel,
    cpu_flags,
    cpu_vendor,
    load_kernel,
    load_prefill_kernel,
    preferred_variants,
    variants,
)
from foveal_runtime.plan.errors import StartupError
from tests.support.models.attention_batches import ORACLE, batch, geometry, pool_as
from tests.support.models.compiled import paths_of

LOADED = load_kernel()
PREFILL = load_prefill_kernel()
pytestmark = pytest.mark.skipif(isinstance(LOADED, str), reason=f"{LOADED}; run `make setup`")


def compare(
    layer: LayerGeometry,
    lengths: list[tuple[int, int]],
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sinks: torch.Tensor | None = None,
    seed: int = 0,
    kernel: Kernel | None = None,
    prefill: PrefillKernel | None = None,
) -> None:
    context, query = batch(layer, lengths, block_size, dtype, seed)
    backend = CpuBackend(kernel or LOADED, prefill or PREFILL)
    assert cpu_module.is_supported(layer, dtype)
    got = backend.attend(layer, query, context, sinks)
    # The oracle computes in float32 on the same (perhaps rounded) numbers.
    narrow, context.pool = context.pool, pool_as(context.pool, torch.float32)
    want = ORACLE.attend(layer, query.float(), context, sinks)
    context.pool = narrow
    tolerance = 2e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(got.float(), want, atol=tolerance, rtol=tolerance)
    assert got.dtype == dtype


SHORT = [(1, 1), (1, 17), (2, 33), (3, 3), (4, 300), (1, 700), (4, 260)]
LONG = [(5, 5), (7, 64), (90, 90), (64, 65), (33, 600), (200, 210)]
RAGGED = [*SHORT[:4], *LONG, *SHORT[4:]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256])
def test_head_sizes_and_groups(dim: int, dtype: torch.dtype) -> None:
    for group in (1, 2, 3, 4, 7, 8):
        compare(geometry(dim, group), RAGGED, dtype=dtype, seed=dim + group)


def test_many_heads_share_a_kv_head() -> None:
    """So many that a task of the prefill kernel holds a few tokens only."""
    for dim, group in ((256, 32), (128, 64), (16, 300)):
        compare(geometry(dim, group), [(9, 70), (1, 40), (130, 130)])


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 5},
        {"sliding_window": 300},
        {"softcap": 3.0},
        {"chunk_size": 64},
        {"scaling": 0.7},
        {"softcap": 20.0, "sliding_window": 40},
    ],
    ids=str,
)
def test_windows_chunks_softcap_scaling_over_block_sizes(options: dict, block_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        compare(geometry(64, 3, **options), RAGGED, block_size, dtype, seed=block_size)


@pytest.mark.parametrize("strength", [-50.0, 0.0, 3.0, 60.0, 400.0])
def test_sinks(strength: float) -> None:
    layer = geometry(64, 4, has_sinks=True, sliding_window=128)
    sinks = torch.linspace(-1, 1, layer.num_heads) + strength
    compare(layer, RAGGED, sinks=sinks)
    compare(layer, RAGGED, dtype=torch.bfloat16, sinks=sinks.to(torch.bfloat16))


def test_a_mixed_batch_is_divided() -> None:
    lengths = [(1, 50), (40, 90), (4, 20), (5, 5), (1, 2000)]
    layer = geometry(64, 2)
    context, query = batch(layer, lengths, 16, torch.float32)
    found = divide(context, context.groups, has_prefill=True)
    assert found.short.token.tolist() == [0, 41, 42, 43, 44, 50]
    assert found.short.length.tolist() == [50, 17, 18, 19, 20, 2000]
    assert found.long.token.tolist() == [*range(1, 41), *range(45, 50)]
    assert found.long.length.tolist() == [*range(51, 91), *range(1, 6)]
    assert found.long.sequence.tolist() == [1] * 40 + [3] * 5
    assert found.chunk_rows.tolist() == [40, 5]
    assert found.other == []
    found = divide(context, context.groups, has_prefill=False)
    assert found.other == [(1, 1), (3, 45)]
    assert not len(found.long.token)
    got = CpuBackend(LOADED, None).attend(layer, query, context)
    torch.testing.assert_close(got, ORACLE.attend(layer, query, context))


def test_chunks_with_groups_go_to_torch() -> None:
    """Tokens of one item see each other: a kernel's row never sees later tokens."""
    layer = geometry(32, 2)
    context, query = batch(layer, [(4, 30), (1, 12), (3, 9), (6, 6), (7, 9)], 8, torch.float32)
    groups = [-1, 0, 0, 0, 5, -1, -1, -1, *[-1] * 6, *[1] * 7]
    context.groups = torch.tensor(groups, dtype=torch.int32)
    found = divide(context, context.groups, has_prefill=True)
    assert found.other == [(0, 0), (4, 14)]
    assert found.chunk_rows.tolist() == [6]
    got = CpuBackend(LOADED, PREFILL).attend(layer, query, context)
    torch.testing.assert_close(got, ORACLE.attend(layer, query, context))


def some_of(context: ForwardContext, sequence: int, tokens: slice, kv_len: int) -> ForwardContext:
    """A batch of some tokens of one sequence, which is `kv_len` long after them."""
    count = tokens.stop - tokens.start
    return replace(
        context,
        q_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([kv_len], dtype=torch.int32),
        block_table=context.block_table[sequence : sequence + 1],
        slots=context.slots[tokens],
        seq_of_token=torch.zeros(count, dtype=torch.int32),
        pos_of_token=context.pos_of_token[tokens],
        q_lens=[count],
        kv_lens=[kv_len],
    )


def attended(layer: LayerGeometry, query: torch.Tensor, context: ForwardContext) -> torch.Tensor:
    """What the backend computes, after a look that two threads compute the same bits."""
    whole = CpuBackend(LOADED, PREFILL).attend(layer, query, context)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(CpuBackend(LOADED, PREFILL).attend(layer, query, context), whole)
    finally:
        torch.set_num_threads(threads)
    return whole


def test_a_prompt_is_the_same_bits_however_it_is_cut() -> None:
    layer = geometry(64, 3, sliding_window=150)
    context, query = batch(layer, [(300, 300), (40, 77)], 16, torch.float32)
    whole = attended(layer, query, context)
    for low, high in ((0, 7), (7, 150), (150, 300)):
        part = some_of(context, 0, slice(low, high), high)
        got = CpuBackend(LOADED, PREFILL).attend(layer, query[low:high], part)
        assert torch.equal(got, whole[low:high])


def test_layers_without_a_kernel_go_to_torch() -> None:
    for layer in (LayerGeometry(0, 4, 2, 24, 24, 0.2), LayerGeometry(0, 4, 4, 48, 32, 0.2)):
        context, query = batch(layer, RAGGED, 16, torch.float32)
        got = CpuBackend(LOADED, PREFILL).attend(layer, query, context)
        torch.testing.assert_close(got, ORACLE.attend(layer, query, context))


def test_a_row_is_the_same_bits_in_any_batch_with_any_number_of_threads() -> None:
    layer = geometry(64, 3)
    lengths = [(1, 900), (2, 40), (1, 5000), (1, 256), (1, 257)]
    context, query = batch(layer, lengths, 16, torch.float32)
    whole = attended(layer, query, context)
    alone = some_of(context, 2, slice(3, 4), 5000)
    assert torch.equal(CpuBackend(LOADED, PREFILL).attend(layer, query[3:4], alone)[0], whole[3])


def test_write_then_attend() -> None:
    layer = geometry(64, 2)
    context, query = batch(layer, [(1, 40), (2, 7)], 16, torch.float32)
    key = torch.randn(3, layer.num_kv_heads, 64)
    backend = CpuBackend(LOADED, PREFILL)
    backend.write_kv(layer, key, key * 2, context)
    assert torch.equal(context.pool.keys[0][context.slots], key)
    assert torch.equal(context.pool.values[0][context.slots], key * 2)
    got = backend.attend(layer, query, context)
    torch.testing.assert_close(got, ORACLE.attend(layer, query, context))


def test_extreme_scores_do_not_overflow() -> None:
    layer = geometry(64, 2, scaling=50.0)
    context, query = batch(layer, RAGGED, 16, torch.float32)
    got = CpuBackend(LOADED, PREFILL).attend(layer, query, context)
    want = ORACLE.attend(layer, query, context)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


def test_every_variant_this_cpu_can_run_agrees() -> None:
    for dim, dtype in itertools.product((16, 80, 128), (torch.float32, torch.bfloat16)):
        for path in paths_of("paged_decode"):
            compare(geometry(dim, 4), RAGGED, dtype=dtype, kernel=Kernel(path))
        for path in paths_of("paged_prefill"):
            compare(geometry(dim, 4), RAGGED, dtype=dtype, prefill=PrefillKernel(path))


def test_variant_choice(tmp_path: Path, monkeypatch) -> None:
    v3 = "flags\t\t: fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor : 0\n{v3}\nflags : other\n")
    assert variants("x86_64", cpu_flags(info)) == ["v3", "generic"]
    info.write_text(v3 + " avx512f avx512bw avx512cd avx512dq avx512vl\n")
    assert variants("x86_64", cpu_flags(info)) == ["v4", "v3", "generic"]
    assert variants("aarch64", frozenset()) == ["generic"]
    info.write_text(info.read_text().strip() + " avx512_bf16\n")
    assert variants("x86_64", cpu_flags(info)) == ["v4_bf16", "v4", "v3", "generic"]
    info.write_text(info.read_text().strip() + " amx_bf16 amx_tile\n")
    for permits, tiled in ((True, ["v4_amx"]), (False, [])):
        monkeypatch.setattr(kernels, "_may_use_tiles", lambda permits=permits: permits)
        assert variants("x86_64", cpu_flags(info)) == [*tiled, "v4_bf16", "v4", "v3", "generic"]
    monkeypatch.undo()
    assert cpu_flags(tmp_path / "absent") == frozenset()
    info.write_text("vendor_id\t: GenuineIntel\n" + info.read_text())
    assert [cpu_vendor(info), cpu_vendor(tmp_path / "absent")] == ["GenuineIntel", ""]
    assert "no paged_decode" in str(load_kernel(tmp_path))
    (tmp_path / f"paged_decode_{preferred_variants()[0]}.so").write_text("junk")
    assert "cannot be loaded" in str(load_kernel(tmp_path))


@pytest.mark.parametrize(
    ("vendor", "more", "best"),
    [
        ("GenuineIntel", "avx512_bf16 avx512_fp16", "v4"),  # Sapphire Rapids without its AMX
        ("GenuineIntel", "avx512_bf16 avx512_fp16 amx_bf16 amx_tile", "v4_amx"),
        ("GenuineIntel", "avx512_bf16", "v4_bf16"),  # Cooper Lake
        ("AuthenticAMD", "avx512_bf16 avx512_fp16", "v4_bf16"),
    ],
)
def test_slow_products_of_bfloat16_pairs_are_not_used(vendor, more, best, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    info = tmp_path / "cpuinfo"
    every = "avx avx2 bmi1 bmi2 f16c fma abm movbe avx512f avx512bw avx512cd avx512dq avx512vl"
    info.write_text(f"vendor_id : {vendor}\nflags : {every} {more}\n")
    assert preferred_variants(info)[0] == best
    assert kernels.has_slow_dots(info) == (best == "v4")
    assert "v4_bf16" in variants("x86_64", cpu_flags(info)), "tests run it all the same"


def test_without_a_prefill_kernel_prompts_are_torchs(caplog, monkeypatch) -> None:
    monkeypatch.setattr(cpu_module, "load_prefill_kernel", lambda: "none here")
    layers = (geometry(64, 2),)
    made = create_backend("cpu", BackendRequest(layers, 16, torch.float32, torch.device("cpu")))
    assert "prompts use the slower torch attention: none here" in caplog.text
    context, query = batch(layers[0], RAGGED, 16, torch.float32)
    got = made.attend(layers[0], query, context)
    torch.testing.assert_close(got, ORACLE.attend(layers[0], query, context))


def test_the_factory_refuses_other_devices_and_announces_slow_layers(caplog) -> None:
    layers = (LayerGeometry(0, 4, 2, 24, 24, 0.2),)
    with pytest.raises(StartupError, match="cuda"):
        create_backend("cpu", BackendRequest(layers, 16, torch.float32, torch.device("cuda")))
    with caplog.at_level(logging.INFO):
        made = create_backend("cpu", BackendRequest(layers, 16, torch.float32, torch.device("cpu")))
    assert isinstance(made, CpuBackend)
    assert "layers [0] use torch attention" in caplog.text


def test_a_whole_model_says_the_same_with_the_kernel(bench) -> None:
    """Gemma 2: head size 16, groups, sliding layers and soft caps, through the real runner."""
    one = bench("gemma2_softcap", attention="cpu")
    assert isinstance(one.runner.backend, CpuBackend)
    prompts = {"a": one.prompt(1, num_text=40), "b": one.prompt(2, num_text=3)}
    jobs = {key: one.job(key, prompt) for key, prompt in prompts.items()}
    one.driver.run(list(jobs.values()), preempt={4: "a"})
    for key, job in jobs.items():
        one.check(job, prompts[key])
