"""Decoder layers in few kernels say what transformers says, and others keep their modules.

Without a GPU their Triton kernels run in Triton's interpreter, over linear layers that are not
packed. FOVEAL_DEVICE=cuda makes the runner use them by itself.
"""

from __future__ import annotations

import pytest
import torch

from foveal_runtime.model.checkpoint import loader
from foveal_runtime.model.gpu import products
from foveal_runtime.model.layers import gpu_layer
from foveal_runtime.model.layers.trial import Trial
from tests.support.models.bench import DEVICE

pytest.importorskip("triton")


@pytest.fixture
def on_gpu_layers(bench, monkeypatch):
    """on_gpu_layers(name, ...) → a bench whose decoder was offered such layers, and how many it
    took."""
    monkeypatch.setattr(loader, "pack_linears", lambda model: 0)

    def make(name: str, **options):
        one = bench(name, **options)
        if DEVICE == "cpu":
            return one, one.runner.forward.use_gpu_layers(one.runner.backend)
        layers = one.runner.loaded.decoder.layers
        return one, sum(isinstance(layer.forward, gpu_layer.GpuLayer) for layer in layers)

    return make


MORE = ["gemma3", "qwen2_5_vl", "mistral3", "internvl"]


@pytest.mark.parametrize(
    "name",
    ["llama", "gemma2_softcap", "qwen3_vl",
     *(pytest.param(name, marks=pytest.mark.extended) for name in MORE)],
)  # fmt: skip
def test_a_family_equals_transformers(name: str, on_gpu_layers) -> None:
    one, num_layers = on_gpu_layers(name)
    assert num_layers == len(one.runner.loaded.decoder.layers)
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()), preempt={5: "a"})
    for key, job in jobs.items():
        one.check(job, prompts[key])


@pytest.mark.extended
def test_beside_the_attention_of_gpus(on_gpu_layers) -> None:
    """Trials and steps as they are there, all in the interpreter."""
    one, num_layers = on_gpu_layers("qwen3_vl", attention="triton")
    assert num_layers == len(one.runner.loaded.decoder.layers)
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()))
    for key, job in jobs.items():
        one.check(job, prompts[key])


@pytest.mark.parametrize("name", ["gpt_oss_sinks", "cohere2", "deepseek_v3_mla", "llama4_text"])
def test_other_layers_keep_their_modules(name: str, on_gpu_layers) -> None:
    one, num_layers = on_gpu_layers(name)
    assert num_layers == 0
    assert not one.runner.forward.has_short_last_layer or DEVICE == "cpu"


def test_a_layer_that_computes_another_thing_is_found_out(on_gpu_layers, monkeypatch) -> None:
    monkeypatch.setitem(
        gpu_layer._ACTIVATIONS, gpu_layer.Activation("swish"), "relu"
    )  # as if it had been read wrongly
    one, num_layers = on_gpu_layers("llama")
    assert num_layers == 0
    prompts, jobs = one.staggered()
    one.driver.run(list(jobs.values()))
    one.check(jobs["a"], prompts["a"])


def test_products_of_prompts_are_tried(on_gpu_layers, monkeypatch) -> None:
    """Those of more rows than a decode step of few sequences has."""
    whole = products.linear
    monkeypatch.setattr(products, "linear", lambda *parts: whole(*parts) * 1.1)
    _, num_layers = on_gpu_layers("llama")
    assert num_layers == 0


@pytest.mark.parametrize(("name", "has_groups"), [("gemma3", True), ("llama", False)])
def test_items_are_tried_where_their_tokens_see_each_other(
    name: str, has_groups: bool, on_gpu_layers, monkeypatch
) -> None:
    trials = []

    def note(*parts: object, **options: object) -> Trial:
        trials.append(Trial(*parts, **options))
        return trials[-1]

    monkeypatch.setattr(gpu_layer, "Trial", note)
    one, num_layers = on_gpu_layers(name)
    assert num_layers == len(one.runner.loaded.decoder.layers)
    assert [trial.context.groups is not None for trial in trials] == [False, False, has_groups]
    assert len(trials[-1].rows) > products.MAX_ROWS


def test_a_decoder_that_differs_as_a_whole_gets_its_forwards_back(
    on_gpu_layers, monkeypatch
) -> None:
    def refuse(*_: object) -> None:
        raise gpu_layer.Unlike("something around its layers differs")

    monkeypatch.setattr(gpu_layer.Trial, "check_whole", refuse)
    one, num_layers = on_gpu_layers("llama")
    assert num_layers == 0
    forwards = [layer.forward for layer in one.runner.loaded.decoder.layers]
    assert not any(isinstance(forward, gpu_layer.GpuLayer) for forward in forwards)


def test_the_norm_and_the_head_behind_the_layers_change_too(on_gpu_layers) -> None:
    one, _ = on_gpu_layers("llama")
    loaded = one.runner.loaded
    norm, head = loaded.decoder.norm, loaded.model.lm_head
    assert "forward" in norm.__dict__
    assert "forward" in head.__dict__
    rows = torch.randn(1, 3, norm.weight.numel(), device=DEVICE, dtype=loaded.dtype)
    for module in (norm, head):
        wanted = type(module).forward(module, rows)
        bound = 1e-5 if loaded.dtype == torch.float32 else 2**-6
        torch.testing.assert_close(module(rows), wanted, atol=bound, rtol=bound)


def test_merged_weights_take_no_more_memory(on_gpu_layers) -> None:
    one, _ = on_gpu_layers("llama")
    layer = one.runner.loaded.decoder.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]
    at = parts[0].weight.data_ptr()
    for part in parts:
        assert part.weight.data_ptr() == at
        at += part.weight.nbytes
    stored = {weight.untyped_storage().data_ptr() for weight in (part.weight for part in parts)}
    assert len(stored) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_the_residual_after_rounding(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, residual = torch.randn(2, 5, 48, device=DEVICE).to(dtype)
    weight = torch.randn(48, device=DEVICE).to(dtype)
    got = gpu_layer._Norm(weight, 1e-5, 1.0)(rows, residual)
    wide = rows.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * (weight.float() + 1)
    bits = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got, normed.to(dtype) + residual, atol=bits, rtol=bits)
