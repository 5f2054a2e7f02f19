"""Predicted costs equal what loading and running the model shows."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
import transformers

from foveal_runtime.main import cli
from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.loader import class_for, read_config
from foveal_runtime.model.checkpoint.weights import stored_bytes, weight_files
from foveal_runtime.model.cpu.packing import weight_bytes
from foveal_runtime.model.device import PeakMeter
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ItemProfile, decode
from tests.support.allocations import most_allocated

NAMES = [
    "llama", "gemma2_softcap", "qwen3_moe", "llama4_text", "deepseek_v3_mla", "llava", "idefics3",
    "qwen2_vl", "qwen3_vl", "gemma3", "paligemma", "voxtral", "qwen2_audio",
    "gemma3n", "gemma4", "gemma4_unified", "qwen3_5", "qwen3_next", "lfm2_vl", "minicpmv4_7",
    "fast_vlm", "hunyuan_vl", "ernie4_5_vl_moe", "step3p7", "granite4_vision",
    "granitemoehybrid", "falcon_h1", "nemotron_h_omni",
    "nemo_speechlm",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_prediction_equals_the_loaded_model(name: str, tiny) -> None:
    path = str(tiny(name))
    found = profiler.predict(path)
    runner = TorchRunner.load(path, block_size=8, attention="torch")
    assert found.kv_bytes_per_token * 8 == runner.kv_block_bytes
    assert sum(found.kv_bytes_per_layer) == found.kv_bytes_per_token
    assert len(found.kv_bytes_per_layer) == len(runner.layers)
    whole = class_for(read_config(path)).from_pretrained(path)
    assert found.weight_bytes == pytest.approx(weight_bytes(whole.parameters()), rel=0.02)
    # Layers of a tower that nobody reads are given back once they are loaded.
    assert weight_bytes(list(runner.loaded.model.parameters())) <= found.weight_bytes * 1.02
    traits = runner.traits
    assert (found.is_multimodal, found.max_model_len) == (traits.is_multimodal, traits.max_position)
    if traits.is_multimodal:
        assert found.bytes_per_embed == traits.embed_bytes
        assert (found.embed_width, found.embed_levels) == (traits.embed_width, traits.embed_levels)
    assert found.activation_bytes > 0
    assert found.activation_bytes_per_token > 0
    assert found.source == "predicted"
    assert found.sources["weight_bytes"] == "headers"
    assert found.sources["kv_bytes_per_token"] == "config"


def test_layers_that_share_keys_and_values_cost_nothing(tiny) -> None:
    found = profiler.predict(str(tiny("gemma4")), "float32")
    small, large = (2 * 2 * dim * 4 for dim in (8, 16))  # keys and values of two heads
    assert found.kv_bytes_per_layer == (small, large, small, large, 0, 0)
    runner = TorchRunner.load(str(tiny("gemma4")), block_size=8, num_blocks=10)
    assert runner.kv_block_bytes == 8 * 2 * (small + large)
    assert found.window_kv_bytes_per_token == 2 * small


def test_a_smaller_dtype_halves_weights_and_kv(tiny) -> None:
    path = str(tiny("llava"))
    wide, narrow = profiler.predict(path, "float32"), profiler.predict(path, "bfloat16")
    assert wide.weight_bytes == 2 * narrow.weight_bytes
    assert wide.kv_bytes_per_token == 2 * narrow.kv_bytes_per_token
    assert wide.bytes_per_embed == 2 * narrow.bytes_per_embed
    assert narrow.dtype == "bfloat16"


def test_measuring_replaces_predictions_and_says_so(bench, tiny) -> None:
    one = bench("qwen2_vl")
    job = one.job("a", one.prompt(3, [(0, 1)]))
    place = job.mm_inputs[0].placeholder
    items = {"image": ItemProfile(num_tokens=place.length, num_embeds=place.num_embeds,
                                  processed_bytes=len(job.values[0]))}  # fmt: skip
    path = str(tiny("qwen2_vl"))
    predicted = profiler.predict(path, items=items)
    found = profiler.measure(
        predicted, path, max_num_batched_tokens=64, values={"image": job.values[0]}
    )
    assert found.source == "measured"
    assert found.kv_bytes_per_token == predicted.kv_bytes_per_token
    assert found.weight_bytes == pytest.approx(predicted.weight_bytes, rel=0.02)
    assert found.sources["activation_bytes"] == "measured"
    assert found.sources["items.image"] == "processor"
    assert found.items == items


def test_copies_of_rows_for_experts_are_planned(tmp_path: Path) -> None:
    """As transformers computes them, which GPUs do: eight times four rows of a wide model."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=512, intermediate_size=512, moe_intermediate_size=128, num_experts=16,
        num_experts_per_tok=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False)
    model.save_pretrained(tmp_path)
    block, rows = model.model.layers[0].mlp, torch.randn(1, 256, 512)
    with torch.inference_mode():
        block(rows)
        allocated = most_allocated(lambda: block(rows))
    each = profiler.predict(str(tmp_path), device="cuda").activation_bytes_per_token
    assert 0.5 * each <= allocated / rows.shape[1] <= each


def test_the_peak_meter_sees_memory_that_is_gone_again() -> None:
    meter = PeakMeter("cpu")
    size = 64 << 20
    peak = meter.peak_of(lambda: torch.ones(size // 4).sum().item())
    assert 0.9 * size < peak < 4 * size


def test_only_files_that_would_be_loaded_count(tmp_path: Path) -> None:
    def write(name: str, tensors: dict[str, tuple[str, list[int], int]]) -> None:
        header = {k: {"dtype": d, "shape": s, "data_offsets": [0, n]}
                  for k, (d, s, n) in tensors.items()}  # fmt: skip
        raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(raw)) + raw)

    with pytest.raises(StartupError, match=r"no \*.safetensors"):
        weight_files(str(tmp_path))
    write("a-1.safetensors", {"x": ("F32", [10, 2], 80), "q": ("I8", [7], 7)})
    write("a-2.safetensors", {"y": ("BF16", [5], 10)})
    write("consolidated.safetensors", {"all": ("F32", [1000], 4000)})
    index = {"weight_map": {"x": "a-1.safetensors", "q": "a-1.safetensors",
                            "y": "../a-2.safetensors"}}  # fmt: skip
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert stored_bytes(str(tmp_path), 2) == 20 * 2 + 7 + 5 * 2
    (tmp_path / "a-2.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    with pytest.raises(StartupError, match=r"a-2\.safetensors: not a safetensors file"):
        stored_bytes(str(tmp_path), 2)
    (tmp_path / "a-2.safetensors").unlink()
    with pytest.raises(StartupError, match="No such file"):
        stored_bytes(str(tmp_path), 2)


@pytest.mark.extended
def test_the_command_prints_a_document_that_the_planner_reads(tiny, capsys) -> None:
    limits = ["--max-pixels", "1000", "--max-frames", "4", "--max-seconds", "5"]
    assert cli.main(["profile", str(tiny("llama")), *limits]) == 0
    found = decode(capsys.readouterr().out.encode())
    assert (found.is_multimodal, found.items) == (False, {})
    assert found.weight_bytes > 0
