"""Qwen's Omni thinkers beyond what all families are compared in: positions, speech, sounds."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from foveal_runtime.engine.types.step import MMInput, NewRequest
from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.loader import load_model, meta_model
from foveal_runtime.model.layers.lora import Loras
from foveal_runtime.model.runner.sequence import prompt_positions
from foveal_runtime.plan.lora import LoraSource
from foveal_runtime.plan.media import PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import BadItem
from tests.support.allocations import most_allocated
from tests.support.models.bench import pack
from tests.support.models.lora import plain, write_adapter
from tests.support.models.rerun_capturer import RerunCapturer
from tests.support.models.tiny_checkpoints import AUDIO, CASES, VIDEO, Prompt, make_prompt

THINKERS = ["qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"]
WHOLE = ["qwen2_5_omni", "qwen3_omni_moe"]


def request_of(prompt: Prompt) -> NewRequest:
    inputs = tuple(
        MMInput(bytes([n]) * 32, item.modality,
                PlaceholderRange(offset, len(item.ids), item.embed_runs))
        for n, (item, offset) in enumerate(zip(prompt.items, prompt.offsets, strict=True))
    )  # fmt: skip
    return NewRequest(
        "a", prompt.ids, len(prompt.ids), inputs, tuple(map(pack, prompt.items)),
        SamplingParams(max_tokens=1),
    )  # fmt: skip


@pytest.fixture(params=THINKERS)
def thinker(request, tiny):
    return request.param, meta_model(str(tiny(request.param)))


def test_positions_are_those_of_transformers(thinker) -> None:
    """Any items in any order, sounds too; times that are whole positions and times that are not."""
    name, loaded = thinker
    rng = np.random.default_rng(7)
    has_clock = 0
    for number in range(40):
        kinds = [int(kind) for kind in rng.integers(0, 3, rng.integers(1, 6))]
        items = [(kind, int(rng.integers(0, 9))) for kind in kinds]
        prompt = make_prompt(CASES[name], number, items, num_text=int(rng.integers(1, 9)))
        fields = CASES[name].forward_kwargs(prompt)
        sounds = fields.get("feature_attention_mask", torch.zeros(0, 0))
        theirs, delta = loaded.core.get_rope_index(
            torch.tensor([prompt.ids]),
            fields.get("image_grid_thw"),
            fields.get("video_grid_thw"),
            fields["attention_mask"],
            audio_seqlens=sounds.sum(-1).long(),
            second_per_grids=fields.get("video_second_per_grid"),
        )
        ours, later = prompt_positions(loaded.core, loaded.adapter, request_of(prompt))
        assert torch.allclose(ours.float(), theirs[:, 0].float(), atol=1e-4, rtol=0)
        assert later == pytest.approx(float(delta), abs=1e-4)
        has_clock += bool((ours[0] != ours[1]).any())
    assert has_clock


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_video_of_no_length_is_refused(thinker, seconds: float) -> None:
    name, loaded = thinker
    prompt = make_prompt(CASES[name], 1, [(VIDEO, 1)])
    prompt.items[0].fields["video_second_per_grid"] = torch.tensor([seconds])
    with pytest.raises(BadItem, match="video_second_per_grid is"):
        prompt_positions(loaded.core, loaded.adapter, request_of(prompt))


def test_a_video_without_times_is_refused(thinker) -> None:
    name, loaded = thinker
    prompt = make_prompt(CASES[name], 1, [(VIDEO, 1)])
    del prompt.items[0].fields["video_second_per_grid"]
    with pytest.raises(BadItem, match="video_second_per_grid"):
        prompt_positions(loaded.core, loaded.adapter, request_of(prompt))


@pytest.fixture(params=WHOLE)
def published(request, tiny, tmp_path: Path) -> Path:
    """As such models are published: with weights that speak, and what is said of all in one."""
    folder = tmp_path / request.param
    shutil.copytree(tiny(request.param), folder)
    weights = load_file(folder / "model.safetensors")
    assert all(name.startswith("thinker.") for name in weights)
    assert "thinker.model.layers.0.self_attn.q_proj.weight" in weights
    weights |= {f"{part}.model.weight": torch.ones(64, 64)
                for part in ("talker", "token2wav", "code2wav")}  # fmt: skip
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_bytes())
    assert config["model_type"] == request.param
    config |= {"enable_audio_output": True, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_that_speak_are_neither_loaded_nor_counted(published: Path) -> None:
    loaded = load_model(str(published))
    names = {name for name, _ in loaded.model.named_parameters()}
    assert not any(part in name for name in names for part in ("talker", "2wav"))
    predicted = profiler.predict(str(published))
    assert predicted.dtype == "bfloat16" == str(loaded.dtype).removeprefix("torch.")
    meta = meta_model(str(published)).model
    assert predicted.weight_bytes == sum(one.nbytes for one in meta.parameters())


def test_adapters_may_be_trained_on_the_whole_model(published: Path, tmp_path: Path) -> None:
    """PEFT names layers by the class that was trained, which may hold the thinker as a part."""
    folder = write_adapter(tmp_path / "adapter", plain(str(published)), 1)
    file = folder / "adapter_model.safetensors"
    stored, loras = load_file(file), Loras(load_model(str(published)), 1 << 24)
    own = "model.language_model."
    assert all(name.startswith(f"base_model.model.{own}") for name in stored)
    layers = []
    for root in (own, f"thinker.{own}", "thinker.model."):
        save_file({name.replace(own, root): one for name, one in stored.items()}, file)
        loras.load(LoraSource(root, str(folder)))
        layers.append(loras.find(loras.refs[-1].digest).pairs.keys())
    assert layers[0] == layers[1] == layers[2]
    assert "layers.0.self_attn.q_proj" in layers[0]


@pytest.mark.parametrize("name", THINKERS)
def test_a_sound_is_encoded_as_if_alone(name: str, bench) -> None:
    """Qwen 3's encoder fills windows up to the longest of a call, and what is behind a short sound
    reaches its last positions; only sounds of one length are encoded in a call."""
    found = []
    for sounds in ([3], [5, 3]):  # of 70 frames and of 240, in windows of 100
        one = bench(name)
        job = one.job("a", one.prompt(1, [(AUDIO, seed) for seed in sounds]))
        one.driver.run([job])
        found.append(one.runner.store.lookup(job.mm_inputs[-1].mm_hash))
    assert torch.allclose(*found, atol=1e-5)
    assert not found[0][1:].any(), "later layers are given nothing of sounds"


def test_what_convolutions_over_a_spectrum_take_is_planned() -> None:
    """Regression: only the layers behind them were, which take a third of it."""
    torch.set_num_threads(1)
    config = hf.Qwen3OmniMoeConfig().thinker_config
    config.audio_config.encoder_layers = 1
    tower = Qwen3OmniMoeAudioEncoder(config.audio_config).to(torch.bfloat16).eval()
    frames = torch.randn(config.audio_config.num_mel_bins, 1000, dtype=torch.bfloat16)

    def encode(count: int) -> None:
        tower(frames[:, :count], feature_lens=torch.tensor([count]))

    with torch.inference_mode():
        encode(100)
        least, most = (most_allocated(lambda n=n: encode(n)) for n in (200, 1000))
    planned = profiler._encoder_bytes(config, 2)["audio"] * (1000 - 200) // 2
    assert 0.6 * planned < most - least <= planned


def test_recorded_steps_keep_fractions_of_positions(bench) -> None:
    one = bench("qwen3_omni_moe_thinker")
    assert one.runner.record_decoding(RerunCapturer(), max_num_seqs=4, max_model_len=96)
    prompts = [one.prompt(seed, [(VIDEO, seed)], num_text=3 + seed) for seed in range(3)]
    jobs = [one.job(str(seed), prompt) for seed, prompt in enumerate(prompts)]
    one.driver.run(jobs)
    assert one.runner._graphs.num_played
    for job, prompt in zip(jobs, prompts, strict=True):
        one.check(job, prompt)
