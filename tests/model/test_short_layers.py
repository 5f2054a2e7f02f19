"""What nobody reads is not computed: rows of the last layer, later layers of vision towers."""

from __future__ import annotations

import logging

import pytest
import torch

from foveal_runtime.model.checkpoint import loader
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import class_for, load_model, read_config
from foveal_runtime.model.checkpoint.probe import probe_layers
from foveal_runtime.model.layers import last_layer
from foveal_runtime.model.layers.last_layer import LastLayer

SHORT = ["llama", "mistral_sliding", "llava", "idefics3", "internvl", "paligemma", "qwen3_moe"]
WHOLE = ["gemma2_softcap", "gpt_oss_sinks", "cohere2", "llama4_text", "gemma3", "qwen3_vl"]


@pytest.mark.parametrize("name", SHORT + WHOLE)
def test_which_families_have_a_short_last_layer(name, bench):
    """That they say the same is shown by test_architectures, which runs with it."""
    one = bench(name)
    assert one.runner.forward.has_short_last_layer == (name in SHORT)
    found = isinstance(one.runner.loaded.decoder.layers[-1].forward, LastLayer)
    assert found == (name in SHORT)


def test_a_prompt_goes_through_it_and_scored_prompts_do_not(bench, monkeypatch):
    one = bench("llama")
    rows = []
    run = LastLayer._run
    monkeypatch.setattr(
        LastLayer, "_run", lambda self, *args: rows.append(len(args[2].index)) or run(self, *args)
    )
    prompt = one.prompt(1, num_text=40)
    job = one.job("a", prompt)
    one.driver.run([job])
    one.check(job, prompt)
    assert rows[:3] == [0, 0, 1]  # chunks of 17, 17 and the rest; only the last one is sampled
    assert set(rows[3:]) == {1}
    rows.clear()
    scored = one.job("b", prompt, prompt_logprobs=0)
    one.driver.reuse = False
    one.driver.run([scored])
    one.check(scored, prompt)
    assert scored.outputs == job.outputs
    assert 0 not in rows


def test_a_last_layer_that_does_more_keeps_its_forward(tiny):
    loaded = load_model(str(tiny("llama")))
    layers = probe_layers(loaded, Head(loaded.model, loaded.core_name))
    loaded.decoder.layers[-1].register_forward_hook(lambda _m, _i, out: out * 1.01)
    assert not last_layer.shorten_last_layer(loaded, layers)


def test_a_trial_that_fails_leaves_the_model_to_its_modules(bench, monkeypatch, caplog):
    """Not to be met with a start that fails: the model could be served. Errors of compilers and
    drivers are of their own types."""
    caplog.set_level(logging.INFO)

    class CompilerError(Exception):
        pass

    def fails(*_args):
        raise CompilerError("no such thing")

    monkeypatch.setattr(LastLayer, "_run", fails)
    one = bench("llama")
    assert not one.runner.forward.has_short_last_layer
    assert "a trial failed: CompilerError: no such thing" in caplog.text
    prompt = one.prompt(1, num_text=9)
    job = one.job("a", prompt)
    one.driver.run([job])
    one.check(job, prompt)


@pytest.mark.parametrize(("name", "dropped"), [("llava", 1), ("llava_next", 1), ("vipllava", 0)])
def test_layers_of_a_tower_that_are_not_read_are_empty(name, dropped, tiny, caplog):
    caplog.set_level(logging.INFO, logger=loader.__name__)
    loaded = load_model(str(tiny(name)))
    assert f"{dropped} of 2 layers" in caplog.text or not dropped
    tower = loaded.core.vision_tower
    found = [m for m in tower.modules() if vars(m).get("forward") is loader.hand_on]
    assert len(found) == dropped
    assert not [p for m in found for p in m.parameters()]
    config = read_config(str(tiny(name)))
    whole = class_for(config).from_pretrained(str(tiny(name))).eval()
    side = config.vision_config.image_size
    pixels = torch.randn(2, 3, side, side)
    with torch.inference_mode():
        wanted = whole.base_model.vision_tower(pixels, output_hidden_states=True).hidden_states
        got = tower(pixels, output_hidden_states=True).hidden_states
    layer = config.vision_feature_layer
    for i in [layer] if isinstance(layer, int) else layer:
        torch.testing.assert_close(got[i], wanted[i], atol=1e-5, rtol=1e-5)


def test_a_tower_whose_features_change_is_left_alone(tiny, monkeypatch):
    """Here the last layer is read after all: by a tower that sums what it returns."""
    features = loader._features

    def summed(tower, pixels, read):
        found = features(tower, pixels, read)
        return [one + tower(pixels).last_hidden_state for one in found]

    monkeypatch.setattr(loader, "_features", summed)
    loaded = load_model(str(tiny("llava")))
    tower = loaded.core.vision_tower
    assert not [m for m in tower.modules() if vars(m).get("forward") is loader.hand_on]
