"""Negative controls: each rule of the model layer, left out, is seen in the logits.

Without these, equality in test_architectures could hold because a tiny model does not care.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foveal_runtime.model.attention import register
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.checkpoint.loader import LoadedModel
from tests.support.models.step_driver import Job
from tests.support.models.tiny_checkpoints import Prompt


class SinklessBackend(TorchBackend):
    def attend(self, layer, query, context, sinks=None):
        return super().attend(layer, query, context, None)


class WithoutDeepstack(torch.nn.Module):
    """A decoder that is not given its deepstack features."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, visual_pos_masks=None, deepstack_visual_embeds=None, **kwargs):
        return self.decoder(**kwargs)


def run(one, items=()) -> tuple[Job, Prompt]:
    prompt = one.prompt(11, items, num_text=25)
    job = one.job("a", prompt)
    one.driver.run([job])
    return job, prompt


def largest(one, items=()) -> float:
    return one.deviation(*run(one, items))


def change_layers(one, **changes) -> None:
    forward = one.runner.forward
    forward.layers = tuple(replace(layer, **changes) for layer in forward.layers)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral_sliding", {"sliding_window": None}),
        ("cohere2", {"sliding_window": None}),
        ("gemma2_softcap", {"softcap": None}),
        ("llama4_text", {"chunk_size": None}),
        ("gemma3", {"groups_ignore_window": True}),
        ("gemma4_large", {"ignores_groups": False}),
    ],
)
def test_layer_rules_are_seen(name: str, changes, bench) -> None:
    """No window, no softcap, no chunks, groups that reach past the window, groups everywhere."""
    one = bench(name)
    change_layers(one, **changes)
    assert largest(one, [(0, 1)] if one.case.items else []) > 1e-2


def test_sinks_are_seen(bench) -> None:
    register("sinkless", lambda request: SinklessBackend())
    assert largest(bench("gpt_oss_sinks", attention="sinkless")) > 1e-2


def test_another_layers_keys_and_values_are_seen(bench) -> None:
    """A layer that shares must read those of its own source, not of another like it."""
    one = bench("gemma4")
    forward = one.runner.forward
    assert [layer.index for layer in forward.layers] == [0, 1, 2, 3, 2, 3]
    forward.layers = tuple(
        replace(layer, index=layer.index - 2) if layer.reads_only else layer
        for layer in forward.layers
    )
    assert largest(one) > 1e-2


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_inputs_of_layers_are_seen(name: str, bench, monkeypatch) -> None:
    """Every token's are those of its id."""
    one = bench(name)
    theirs = LoadedModel.layer_inputs
    monkeypatch.setattr(
        LoadedModel, "layer_inputs", lambda self, ids: theirs(self, torch.zeros_like(ids))
    )
    assert largest(one) > 1e-2


def test_inputs_of_layers_where_encoder_outputs_go_are_seen(bench) -> None:
    """They are those of padding, which has another id here than 0."""
    one = bench("gemma4")
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, placeholder_id="zero")
    assert largest(one, [(0, 1)]) > 1e-2


def test_tables_of_marks_are_seen(bench) -> None:
    """Gemma 3n embeds the marks behind an image and a sound by tables of their own."""
    one = bench("gemma3n")
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, embed_tokens=None)
    assert largest(one, [(0, 1)]) > 1e-2
    again = bench("gemma3n")
    again.check(*run(again, [(0, 1), (2, 1)]))


@pytest.mark.parametrize("name", ["gemma3", "paligemma", "gemma4_large", "gemma4_unified"])
def test_bidirectional_groups_are_seen(name: str, bench) -> None:
    """gemma3 without groups says the same tokens here and there: only logits tell."""
    one = bench(name)
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, bidirectional="none")
    assert largest(one, [(0, 1)]) > 1e-2


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "hunyuan_vl", "ernie4_5_vl_moe"]
)
def test_mrope_is_seen(name: str, bench) -> None:
    one = bench(name)
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, rope={})
    assert largest(one, [(0, 1)]) > 1e-2


def test_video_seconds_are_seen(bench) -> None:
    """Qwen2.5-VL stretches a video's positions by seconds per grid."""
    one = bench("qwen2_5_vl")
    adapter = one.runner.loaded.adapter
    rope = {k: v for k, v in adapter.rope.items() if k != "second_per_grid_ts"}
    one.runner.loaded.adapter = replace(adapter, rope=rope)
    assert largest(one, [(1, 1)]) > 1e-2


def test_experts_of_images_are_seen(bench) -> None:
    """ERNIE 4.5 VL has others for words."""
    one = bench("ernie4_5_vl_moe")
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, layer_inputs=None)
    assert largest(one, [(0, 1)]) > 1e-2


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_deepstack_is_seen(name: str, bench) -> None:
    one = bench(name)
    one.runner.loaded.decoder = WithoutDeepstack(one.runner.loaded.decoder)
    assert largest(one, [(0, 1)]) > 1e-2


def test_query_correction_is_seen(bench) -> None:
    """Llama 4 scales queries by their index in the call, which in a flat batch is no position."""
    one = bench("llama4_text")
    one.runner.loaded.adapter = replace(one.runner.loaded.adapter, correct_query=None)
    assert largest(one) > 1e-3


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "voxtral"])
def test_hash_without_item_keys_is_seen(name: str, bench) -> None:
    """Prompts that differ only in the item must not share blocks; if they do, logits differ."""
    one = bench(name, image_keys=False)
    kind = next(iter(one.case.items))
    first, second = one.prompt(11, [(kind, 1)], num_text=3), one.prompt(11, [(kind, 7)], num_text=3)
    assert first.ids == second.ids
    a, b = one.job("a", first), one.job("b", second)
    one.driver.run([a])
    one.check(a, first)
    one.driver.run([b])
    assert b.num_cached > 3
    assert one.deviation(b, second) > 1e-2
