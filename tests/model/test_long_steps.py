"""Long steps in one call of the kernel: chunks of prompts, and streams beside them."""

from __future__ import annotations

import pytest
import torch

from foveal_runtime.model.cpu.fusing import TOLERANCE
from foveal_runtime.model.cpu.kernels import DecoderKernel, load_decoder_kernel
from foveal_runtime.model.cpu.packing import can_pack
from foveal_runtime.model.layers import decoder_layers
from foveal_runtime.model.layers.decoder_layers import DecoderLayers
from foveal_runtime.model.layers.last_layer import WantedRows, shorten_last_layer
from foveal_runtime.model.layers.trial import Trial
from tests.support.models.compiled import NEEDS_KERNEL, NEEDS_PACKING, params_of, paths_of
from tests.support.models.decoders import (
    DTYPES,
    TAKEN,
    compare_layer,
    made_of,
    reset,
    states_of,
)

pytestmark = [NEEDS_PACKING, NEEDS_KERNEL]
LONG = [(130, 900), (1, 700), (5, 5), (70, 300), (4, 60)]
"""New tokens of sequences, and how many there are then: chunks, and some that attend alone."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*sorted(TAKEN.keys() - {"seed_oss"}), "gemma"])
def test_each_layer_equals_its_modules_in_long_steps(kind, dtype, tiny, named):
    if not can_pack(getattr(torch, dtype)):
        pytest.skip(f"no packed {dtype} on this machine")
    loaded, layers = made_of(tiny(named(kind)), dtype)
    states = states_of(loaded)
    q_lens, kv_lens = zip(*LONG, strict=True)
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=q_lens, kv_lens=kv_lens, states=states)
        for path in paths_of("decoder_layers"):
            with trial.random_states() as kept:
                made = DecoderLayers(loaded, layers, DecoderKernel(path), states)
                made.bind(trial.pool)
                assert not made.is_small(trial.context)
                for number in range(len(loaded.decoder.layers)):
                    if dtype == "float32":
                        compare_layer(made, trial, number, kept)
                    else:
                        compare_errors(made, trial, number, kept)


def compare_errors(made: DecoderLayers, trial: Trial, number: int, states: list) -> None:
    """The largest of so many roundings says little: in the mean, long steps err like small ones."""
    before = [one.clone() for one in states]
    routed, means = made._parts[number].routed, []
    with trial.clear_choices(routed and routed.router) as clear:
        wanted = trial.added_by(number)
    for limits in (made.limits, decoder_layers.Limits(len(trial.rows), 10**6)):
        reset(states, before)
        got = trial.rows.clone()
        usual, made.limits = made.limits, limits
        made.run_layers(got, trial.positions, trial.context, range(number, number + 1))
        made.limits = usual
        error = (got.double() - trial.rows.double() - wanted)[clear].abs()
        assert error.max() <= 2 * TOLERANCE[torch.bfloat16] * wanted.abs().max()
        means.append(float(error.mean()))
    assert means[0] <= 1.05 * means[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("path", params_of("decoder_layers"))
def test_a_long_step_is_the_same_bits_in_several_calls(path, kind, dtype, tiny, named, monkeypatch):
    """Calls end within chunks, some just after they begin or before they end."""
    loaded, layers = made_of(tiny(named(kind)), dtype)
    states = states_of(loaded)
    every = range(len(loaded.decoder.layers))
    q_lens, kv_lens = zip(*LONG, strict=True)
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=q_lens, kv_lens=kv_lens, states=states)
        with trial.random_states() as kept:
            made = DecoderLayers(loaded, layers, DecoderKernel(path), states)
            made.bind(trial.pool)
            first, found = [one.clone() for one in kept], []
            before = torch.get_num_threads()
            for threads, most in ((2, 1024), (1, 1024), (3, 1024), (2, 100), (2, 64)):
                monkeypatch.setattr(decoder_layers, "MOST_ROWS", most)
                reset(kept, first)
                for pool in (*trial.pool.keys, *trial.pool.values):
                    pool[trial.context.slots] = 7
                torch.set_num_threads(threads)
                try:
                    rows = trial.rows.clone()
                    made.run_layers(rows, trial.positions, trial.context, every)
                finally:
                    torch.set_num_threads(before)
                found.append(rows)
                assert torch.equal(rows, found[0]), (threads, most)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_nobody_wants_end_before_the_last_layer(dtype, tiny, named):
    loaded, layers = made_of(tiny(named("qwen3")), dtype)
    assert shorten_last_layer(loaded, layers)
    q_lens, kv_lens = zip(*LONG, strict=True)
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=q_lens, kv_lens=kv_lens)
        made = DecoderLayers(loaded, layers, load_decoder_kernel())
        made.bind(trial.pool)
        last = trial.context.q_start[1:].long() - 1
        few = WantedRows(last, list(kv_lens))
        whole = made.run(trial.rows, trial.positions, trial.context)
        kept = [pool[trial.context.slots].clone() for pool in trial.pool.keys]
        got = made.run(trial.rows, trial.positions, trial.context, few=few)
        assert got.shape == (len(last), trial.rows.shape[1])
        trial.check_same("rows", got, whole[last])
        for pool, other in zip(trial.pool.keys, kept, strict=True):
            trial.check_same("kept", pool[trial.context.slots], other)
