"""Steps in one call of the kernel: what takes that way says the same, what differs does not.

Layer by layer against transformers' modules over long contexts and windows, whole families against
transformers' own model through the runner, and models that only look alike.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from foveal_runtime.model.attention import KVPool
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu import packing
from foveal_runtime.model.cpu.kernels import DecoderKernel
from foveal_runtime.model.cpu.packing import can_pack, layout_of, pack_linears
from foveal_runtime.model.layers import decoder_layers
from foveal_runtime.model.layers.decoder_layers import DecoderLayers, make_decoder_layers
from foveal_runtime.model.layers.trial import Trial
from foveal_runtime.model.runner.runner import TorchRunner
from tests.support.models.compiled import NEEDS_KERNEL, NEEDS_PACKING, params_of, paths_of
from tests.support.models.decoders import (
    DTYPES,
    NOT_TAKEN,
    TAKEN,
    compare_layer,
    made_of,
    reset,
    states_of,
)

pytestmark = [NEEDS_PACKING, NEEDS_KERNEL]
HYBRID = ["lfm2", "lfm2_vl", "qwen3_5_text", "qwen3_5", "qwen3_5_moe", "minicpm_ocr",
          "minicpmv4_6", "minicpmv4_7"]  # fmt: skip
"""The step driver reuses blocks of tokens, not states."""


@pytest.mark.parametrize("kind", TAKEN)
def test_a_family_equals_transformers(kind, bench, named):
    one = bench(named(kind), attention="auto", reuse=kind not in HYBRID)
    assert one.runner.forward.decoder_layers is not None
    prompts = {"a": one.prompt(1, num_text=40), "b": one.prompt(2, num_text=9)}
    jobs = {name: one.job(name, prompt) for name, prompt in prompts.items()}
    one.driver.run(list(jobs.values()), preempt={4: "a"})
    for name, job in jobs.items():
        one.check(job, prompts[name])


MEDIA = ["llava", "llava_next", "llava_onevision", "vipllava", "idefics3", "smolvlm", "internvl",
         "mistral3", "paligemma", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5",
         "gemma3", "lfm2_vl", "qwen2_audio", "voxtral"]  # fmt: skip
MORE = ["audioflamingo3", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "fast_vlm",
        "fun_asr_nano", "glmasr", "got_ocr2", "janus", "lighton_ocr", "llava_next_video",
        "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "moss_transcribe_diarize", "ovis2",
        "paddleocr_vl", "perception_lm", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni",
        "qwen2_5_omni_thinker", "qwen3_5_moe", "qwen3_asr", "qwen3_omni_moe",
        "qwen3_omni_moe_thinker", "video_llama_3", "video_llava"]  # fmt: skip
KEPT = ["aria", "aya_vision", "bamba", "cohere2_vision", "cohere_compass", "cosmos3_edge",
        "deepseek_ocr2", "ernie4_5_vl_moe", "exaone4_5", "falcon_h1", "gemma3n", "gemma3n_text",
        "gemma4", "gemma4_text", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr",
        "glmga", "granite4_vision", "granite_docling", "granitemoehybrid_dense", "hunyuan_vl",
        "hyperclovax_vision_v2", "kimi_k25", "lfm3", "lfm3_vl", "llama4", "llama4_text",
        "mistral4", "muse_glimmer", "nemo_speechlm", "nemotron_h", "nemotron_h_omni", "qwen3_next",
        "step3p7"]  # fmt: skip
"""docs/reference/models.md says so of all of these."""


@pytest.fixture
def wide(checkpoints):
    """wide(name) → the name of a case's twin with heads of 16 numbers, which the kernels know."""

    def get(name: str) -> str:
        case = checkpoints.CASES[name]

        def config():
            made = case.config()
            text = made.get_text_config()
            text.num_attention_heads, text.num_key_value_heads, text.head_dim = 2, 1, 16
            if "mrope_section" in (getattr(text, "rope_parameters", None) or {}):
                sections = [3, 3, 2] if name == "ernie4_5_vl_moe" else [2, 3, 3]
                text.rope_parameters = {**text.rope_parameters, "mrope_section": sections}
            return made

        if name == "kimi_k25":  # its keys and values come of one latent
            return name
        checkpoints.CASES.setdefault(f"{name}_16", replace(case, config=config))
        return f"{name}_16"

    return get


@pytest.mark.parametrize(
    "name", [*MEDIA, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE)]
)
def test_a_multimodal_family_equals_transformers(name, bench, wide):
    one = bench(wide(name), attention="auto", reuse=name not in HYBRID)
    case = one.case
    assert one.runner.forward.decoder_layers is not None
    modality = min(case.items)
    prompts = {
        "a": one.prompt(1, [(modality, 7)], num_text=20),
        "b": one.prompt(2, [(modality, 8), (modality, 7)]),
    }
    jobs = {key: one.job(key, prompt) for key, prompt in prompts.items()}
    one.driver.run(list(jobs.values()), preempt={6: "a"})
    for key, job in jobs.items():
        one.check(job, prompts[key])


@pytest.mark.extended
@pytest.mark.parametrize("name", KEPT)
def test_a_family_that_the_kernel_does_not_know_keeps_its_modules(name, tiny, wide, caplog):
    caplog.set_level(logging.INFO, logger=decoder_layers.__name__)
    runner = TorchRunner(load_model(str(tiny(wide(name)))), num_blocks=4)
    assert runner.forward.decoder_layers is None
    assert "small steps are computed by modules: " in caplog.text


@pytest.mark.parametrize("kind", NOT_TAKEN)
def test_other_families_keep_their_modules(kind, bench, named, caplog):
    caplog.set_level(logging.INFO, logger=decoder_layers.__name__)
    one = bench(named(kind), attention="auto")
    assert one.runner.forward.decoder_layers is None
    assert NOT_TAKEN[kind][1] in caplog.text


def test_scaled_queries_are_taken_where_no_request_comes_that_far(tiny, named):
    runner = TorchRunner.load(str(tiny(named("ministral3"))), max_model_len=64, num_blocks=8)
    assert runner.forward.decoder_layers is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*sorted(TAKEN.keys() - {"seed_oss"}), "gemma"])
def test_each_layer_equals_its_modules_over_long_contexts(kind, dtype, tiny, named):
    if not can_pack(getattr(torch, dtype)):
        pytest.skip(f"no packed {dtype} on this machine")
    loaded, layers = made_of(tiny(named(kind)), dtype)
    lengths = (1, 700, 16, 256, 257, 300, 513, 12, 13, 90, 1000)
    states = states_of(loaded)
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=[1] * len(lengths), kv_lens=lengths, states=states)
        for path in paths_of("decoder_layers"):
            with trial.random_states() as kept:
                made = DecoderLayers(loaded, layers, DecoderKernel(path), states)
                made.bind(trial.pool)
                for number in range(len(loaded.decoder.layers)):
                    compare_layer(made, trial, number, kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("path", params_of("decoder_layers"))
def test_a_row_is_the_same_bits_in_any_batch_with_any_number_of_threads(
    path, kind, dtype, tiny, named
):
    loaded, layers = made_of(tiny(named(kind)), dtype)
    states, every = states_of(loaded), range(len(loaded.decoder.layers))
    most = decoder_layers.FAST_LIMITS.rows
    lengths, ones = list(range(3, 3 + 9 * most, 9)), [1] * most
    with torch.inference_mode():
        whole = Trial(loaded, layers, q_lens=ones, kv_lens=lengths, states=states)
    with torch.inference_mode(), whole.random_states() as kept:
        made = DecoderLayers(loaded, layers, DecoderKernel(path), states)
        made.bind(whole.pool)
        first = [one.clone() for one in kept]
        wanted = whole.rows.clone()
        made.run_layers(wanted, whole.positions, whole.context, every)
        before = torch.get_num_threads()
        for threads, count in ((1, most), (2, most), (3, 7), (2, 1), (1, 5)):
            some = slice(2, 2 + count) if count < most else slice(None)
            reset(kept, first)
            got = whole.rows[some].clone()
            torch.set_num_threads(threads)
            try:
                made.run_layers(got, whole.positions[:, some], part_of(whole, some), every)
            finally:
                torch.set_num_threads(before)
            assert torch.equal(got, wanted[some]), (threads, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["qwen3", "lfm2", "qwen3_5_text"])
@pytest.mark.parametrize("path", params_of("decoder_layers"))
def test_a_chunk_is_the_same_bits_as_its_tokens_one_by_one(path, kind, dtype, tiny, named):
    loaded, layers = made_of(tiny(named(kind)), dtype)
    states = states_of(loaded)
    every = range(len(loaded.decoder.layers))
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=(5, 1, 9), kv_lens=(300, 20, 9), states=states)
        with trial.random_states() as kept:
            made = DecoderLayers(loaded, layers, DecoderKernel(path), states)
            made.bind(trial.pool)
            before = [one.clone() for one in kept]
            whole = trial.rows.clone()
            made.run_layers(whole, trial.positions, trial.context, every)
            for pool in (*trial.pool.keys, *trial.pool.values):
                pool[trial.context.slots] = 7
            reset(kept, before)
            for i, sequence in enumerate(trial.context.seq_of_token.tolist()):
                one = slice(i, i + 1)
                context = replace(
                    trial.context,
                    slots=trial.context.slots[one],
                    block_table=trial.context.block_table[sequence : sequence + 1],
                    q_lens=[1],
                    kv_lens=[int(trial.context.pos_of_token[i]) + 1],
                    state_slots=[sequence],
                )
                got = trial.rows[one].clone()
                made.run_layers(got, trial.positions[:, one], context, every)
                assert torch.equal(got, whole[one]), i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("path", params_of("decoder_layers"))
def test_long_steps_take_the_modules_where_the_kernel_is_slower(
    path, dtype, tiny, named, monkeypatch
):
    loaded, layers = made_of(tiny(named("llama")), dtype)
    kernel = DecoderKernel(path)
    made = DecoderLayers(loaded, layers, kernel)
    is_fast = dtype == "bfloat16" and kernel.is_fast_in_bfloat16
    fast = decoder_layers.TILE_LIMITS if kernel.has_tiles else decoder_layers.FAST_LIMITS
    limits = fast if is_fast else decoder_layers.LIMITS
    assert made.limits == limits
    is_alone = packing.packed_class(torch.bfloat16) is packing.PairedLinear
    assert made.takes_long == (
        is_fast or is_alone if dtype == "bfloat16" else kernel.is_fast_in_float32
    )
    rows, most = limits
    for q_lens, kv_lens, is_small in (
        ((8, 1), (most // 8 - 1, 5), True),
        ((8, 1), (most // 8, 5), False),
        ((1, 1), (most, most), True),
        ((rows, 1), (rows, 5), False),
    ):
        with torch.inference_mode():
            trial = Trial(loaded, layers, q_lens=q_lens, kv_lens=kv_lens)
        assert made.is_small(trial.context) == is_small, q_lens
        is_taken = made.takes(trial.positions, trial.context, {})
        assert is_taken == (is_small or made.takes_long), q_lens
    with torch.inference_mode():
        trial = Trial(loaded, layers, q_lens=(3,), kv_lens=(3,))
    places = trial.positions.expand(3, 1, -1).clone()
    assert made.takes(places, trial.context, {"deepstack_visual_embeds": []})
    assert not made.takes(places, trial.context, {"layer_inputs": places})
    # A decoder that keeps a token's places on several axes apart.
    monkeypatch.setattr(DecoderLayers, "_has_one_turn", lambda *_: False)
    made = DecoderLayers(loaded, layers, kernel)
    assert made.takes(places, trial.context, {})
    places[1, 0, 0] += 1  # in the middle of an image
    assert not made.takes(places, trial.context, {})


def part_of(trial: Trial, some: slice):
    context = trial.context
    return replace(
        context,
        slots=context.slots[some],
        block_table=context.block_table[some],
        q_lens=context.q_lens[some],
        kv_lens=context.kv_lens[some],
        state_slots=context.state_slots[some],
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_what_looks_like_a_known_layer_but_is_not_is_noticed(kind, tiny, named):
    """One thing is another in the last layer, or around all: the trial must see it."""

    def scaled_values(decoder):
        module = decoder.layers[-1].self_attn.v_proj
        module.register_forward_hook(lambda _m, _i, out: out * 1.01)

    def other_norm(decoder):
        norm = decoder.layers[-1].input_layernorm
        old = norm.forward.original if hasattr(norm.forward, "original") else norm.forward
        norm.forward = lambda rows: old(rows) * 1.001

    def other_rotation(decoder):
        attention = decoder.layers[-1].self_attn
        old = attention.forward

        def turned(*args, position_embeddings, **kwargs):
            cos, sin = position_embeddings
            return old(*args, position_embeddings=(cos, -sin), **kwargs)

        attention.forward = turned

    def around(decoder):
        decoder.layers[0].register_forward_pre_hook(lambda _m, args: (args[0] * 1.5, *args[1:]))

    def scaled_norm(decoder):
        module = decoder.layers[-1].post_attention_layernorm
        module.register_forward_hook(lambda _m, _i, out: out * 1.01)

    for change in (scaled_values, other_norm, other_rotation, around, scaled_norm):
        loaded, layers = made_of(tiny(named(kind)))
        pool = KVPool(layers, 4, 16, torch.float32, torch.device("cpu"))
        assert make_decoder_layers(loaded, layers, pool) is not None
        change(loaded.decoder)
        assert make_decoder_layers(loaded, layers, pool) is None, change.__name__


@pytest.mark.parametrize(
    ("kind", "module", "part"),
    [("lfm2", "conv", "conv"), ("qwen3_5_text", "linear_attn", "recurrent")],
)
def test_a_state_that_the_kernel_does_not_leave_is_noticed(kind, module, part, tiny, named):
    """What the layer adds is the same; only the next token would show it."""
    loaded, layers = made_of(tiny(named(kind)))
    states = states_of(loaded)
    states.allocate(4, torch.device("cpu"))
    pool = KVPool(layers, 4, 16, torch.float32, torch.device("cpu"))
    kept = [one.clone() for one in states.pool.all_tensors()]
    assert make_decoder_layers(loaded, layers, pool, states) is not None
    assert all(map(torch.equal, kept, states.pool.all_tensors()))

    def forgets(_module, _rows, _out):
        states.pool.tensors[2][part].mul_(0.99)

    loaded.decoder.layers[2].get_submodule(module).register_forward_hook(forgets)
    assert make_decoder_layers(loaded, layers, pool, states) is None


def test_an_unknown_layout_is_refused(tiny, named, monkeypatch):
    loaded, layers = made_of(tiny(named("llama")))
    pool = KVPool(layers, 4, 16, torch.float32, torch.device("cpu"))
    raw = packing.raw_numbers
    layout_of.cache_clear()
    try:
        monkeypatch.setattr(packing, "raw_numbers", lambda packed: raw(packed).flip(0))
        assert make_decoder_layers(loaded, layers, pool) is None
    finally:
        layout_of.cache_clear()


def test_a_pool_of_another_dtype_is_refused(tiny, named):
    loaded, layers = made_of(tiny(named("llama")))
    pool = KVPool(layers, 4, 16, torch.bfloat16, torch.device("cpu"))
    assert make_decoder_layers(loaded, layers, pool) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(768, 768), (136, 80), (100, 48), (17, 33), (2048, 100)])
def test_a_known_layout_says_where_each_number_is(shape, dtype):
    if not can_pack(dtype):
        pytest.skip(f"no packed {dtype} on this machine")
    linear = nn.Linear(shape[1], shape[0], bias=False).to(dtype)
    holder = nn.Sequential(linear)
    if pack_linears(holder) == 0 or (layout := holder[0].product()) is None:
        pytest.skip("not laid out in a known way on this machine")
    weight = holder[0].weight
    raw = packing.raw_numbers(weight) if weight.is_mkldnn else weight.flatten()
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        out, into = (int(torch.randint(n, (1,), generator=generator)) for n in shape)
        at = out // layout.wide * layout.out_stride + into // layout.deep * layout.in_stride
        o, i = out % layout.wide, into % layout.deep
        at += (i // 2 * layout.wide + o) * 2 + i % 2 if layout.paired else i * layout.wide + o
        assert raw[at] == linear.weight[out, into]


def test_a_slower_kernel_leaves_larger_steps_to_the_modules(bench, named, monkeypatch):
    monkeypatch.setattr(decoder_layers, "LIMITS", decoder_layers.LIMITS._replace(rows=4))
    one = bench(named("llama"), attention="auto")
    one.runner.forward.decoder_layers.takes_long = False
    calls = []
    taken = one.runner.forward.decoder_layers.run
    one.runner.forward.decoder_layers.run = lambda *args: calls.append(len(args[0])) or taken(*args)
    one.driver.budget = 200
    prompts = {str(i): one.prompt(i, num_text=5) for i in range(7)}
    jobs = {name: one.job(name, prompt) for name, prompt in prompts.items()}
    one.driver.run([jobs["0"], jobs["1"]])
    assert calls == [2] * 5  # the first of six tokens comes with the prompt
    calls.clear()
    one.driver.run([jobs[name] for name in "23456"])
    assert calls == []
    for name, job in jobs.items():
        one.check(job, prompts[name])
