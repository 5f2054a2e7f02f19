"""What the loader refuses, and that it says why in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from foveal_runtime.model.adapters import ADAPTERS
from foveal_runtime.model.checkpoint.loader import (
    adapter_for,
    check_class,
    class_for,
    load_model,
    read_config,
)
from foveal_runtime.model.checkpoint.probe import meta_layers
from foveal_runtime.model.checkpoint.weights import check_weights
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.embedder import check_task
from foveal_runtime.plan.errors import StartupError


def refusal(config) -> str:
    def load() -> None:
        adapter_for(config)
        check_class(config, class_for(config))

    with pytest.raises(StartupError) as caught:
        load()
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("MambaConfig", {}, "recurrent or state-space"),
        ("JambaConfig", {}, "recurrent or state-space"),
        ("Qwen3Config", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ("BloomConfig", {}, "cannot be replaced"),
        ("LlamaConfig", {"hidden_size_per_layer_input": 4}, "per-layer token embeddings"),
        ("Gemma3TextConfig", {"use_bidirectional_attention": True}, "both directions"),
    ],
)
def test_text_models_without_plain_kv_are_refused(kind: str, options, reason: str) -> None:
    if "layer_types" in options:
        options = {**options, "num_hidden_layers": len(options["layer_types"])}
    assert reason in refusal(getattr(transformers, kind)(**options))


def test_scaling_past_the_models_own_length_is_left_out(tmp_path) -> None:
    """As InternVL3 has it: transformers asks in every step whether a position lies past the length,
    which a model without values cannot answer, so that no profile could be made."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    config = transformers.Qwen2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, vocab_size=32, max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert len(meta_layers(str(tmp_path))) == 2
    positions = torch.arange(64)[None]
    own, plain = (
        class_for(one)(one).model.rotary_emb(torch.zeros(1), positions)
        for one in (config, read_config(str(tmp_path)))
    )
    assert all(map(torch.equal, own, plain)), "up to that length nothing is scaled"


@pytest.mark.parametrize(("longest", "kind"), [(64, "short"), (65, "long"), (0, "long")])
def test_long_rope_is_decided_once_not_by_each_step(longest, kind, tmp_path) -> None:
    """transformers' own choice follows the longest position of a call, so of all its requests."""
    factors = {"short_factor": [1.0, 2.0], "long_factor": [4.0, 8.0]}
    config = transformers.Phi3Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=8, vocab_size=32, pad_token_id=0, eos_token_id=1,
        max_position_embeddings=256, original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    settled = read_config(str(tmp_path), max_model_len=longest)
    rotary = class_for(settled)(settled).model.rotary_emb
    alone, beside = (rotary(torch.zeros(1), torch.arange(n)[None]) for n in (5, 200))
    assert all(map(torch.equal, alone, (one[:, :5] for one in beside)))
    wanted = 5 / torch.tensor(factors[f"{kind}_factor"]) / 1e4 ** torch.tensor([0.0, 0.5])
    found = torch.atan2(beside[1][0, 5], beside[0][0, 5])[:2]
    assert torch.allclose(found, torch.atan2(wanted.sin(), wanted.cos()))


def test_encoders_are_refused_by_the_probe(tmp_path) -> None:
    """ELECTRA has a causal class and replaceable attention, but looks both ways."""
    config = transformers.ElectraConfig(
        hidden_size=16,
        embedding_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    class_for(config)(config).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="not supported"):
        TorchRunner.load(str(tmp_path), attention="torch")


@pytest.mark.parametrize(
    "kind",
    ["MllamaConfig", "Blip2Config", "Florence2Config", "Idefics2Config"],
)
def test_unknown_multimodal_models_are_refused(kind: str) -> None:
    message = refusal(getattr(transformers, kind)())
    assert "multimodal and not supported" in message
    assert "choose a family of the documentation's page of supported models" in message


def test_a_kind_that_is_almost_known_is_named(tmp_path: Path) -> None:
    """A typing error in config.json, or a name of another project, costs a search otherwise."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5vl"}')
    with pytest.raises(StartupError) as refused:
        read_config(str(tmp_path))
    assert "does not know model_type 'qwen2_5vl' (did you mean qwen2_5_vl" in str(refused.value)
    (tmp_path / "config.json").write_text('{"model_type": "zzyzx"}')
    with pytest.raises(StartupError, match="model_type 'zzyzx'; code from checkpoints"):
        read_config(str(tmp_path))
    assert "nearest supported relatives: idefics3" in refusal(transformers.Idefics2Config())


@pytest.mark.parametrize("kind", ["T5Config", "WhisperConfig", "CLIPConfig"])
def test_other_models_are_refused(kind: str) -> None:
    assert refusal(getattr(transformers, kind)())


def test_every_adapter_names_a_loadable_class() -> None:
    for kind, adapter in ADAPTERS.items():
        config = transformers.AutoConfig.for_model(kind)
        ungrouped = replace(adapter, bidirectional="none") if adapter.groups_if else adapter
        assert adapter_for(config) in (adapter, ungrouped)
        check_class(config, class_for(config))


def test_missing_checkpoint_is_one_line(tmp_path) -> None:
    with pytest.raises(StartupError, match=r"no config\.json there"):
        load_model(str(tmp_path))


def test_code_from_checkpoints_is_never_run(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')\n")
    with pytest.raises(StartupError, match="never run"):
        read_config(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "field", "tower"),
    [
        ("gemma3n", "architecture", {"architecture": "hf-hub:someone/tower"}),
        ("gemma3n", "model_args", {"model_args": {"checkpoint_path": "/etc/hostname"}}),
        ("gemma3n", "model_args", {"model_args": {"depth": 2, "others": [1, ["/etc/hostname"]]}}),
        ("gemma3n", "model_args", {"model_args": {"pretrained_cfg": {"file": "/etc/hostname"}}}),
        ("llava", "architecture", {"model_type": "timm_wrapper", "architecture": "local-dir:/tmp"}),
        ("llava", "backbone", {"model_type": "timm_backbone", "backbone": "hf-hub:a/b"}),
    ],
)
def test_towers_come_from_nowhere_else(kind: str, field: str, tower, tmp_path: Path) -> None:
    """timm would ask a hub for them, or read another file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "vision_config": tower}))
    with pytest.raises(StartupError, match=rf"vision_config\.{field} in config\.json") as refused:
        read_config(str(tmp_path))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "change",
    [
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "kernels-community/flash-attn2"},
        {"experts_implementation": "sonicmoe"},
        {"return_dict": False, "text_config": {"return_dict": False}},
        {"output_hidden_states": True, "output_attentions": True},
    ],
    ids=str,
)
def test_settings_of_the_machine_it_was_trained_on_are_put_back(change, tiny, tmp_path) -> None:
    """Packages that are not there were an ImportError of the profile, outputs as tuples "'tuple'
    object has no attribute"."""
    shutil.copytree(tiny("qwen3_vl_moe"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    for name, value in change.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(meta_layers(str(tmp_path))) == config["text_config"]["num_hidden_layers"]
    loaded = TorchRunner.load(str(tmp_path), attention="torch").loaded
    assert not loaded.text_config.output_hidden_states


def test_pickled_weights_are_refused(tmp_path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(StartupError, match=r"pickles \(pytorch_model\.bin\)"):
        check_weights(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(StartupError, match="no \\*\\.safetensors"):
        check_weights(str(tmp_path))


def test_broken_weights_are_one_line(tiny, tmp_path) -> None:
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(StartupError, match="not a safetensors file"):
        load_model(str(tmp_path))


def test_weights_of_another_model_are_refused(tiny, tmp_path) -> None:
    """transformers fills missing weights with random numbers and only warns."""
    (tmp_path / "config.json").write_text((tiny("llama") / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(
        (tiny("cohere2") / "model.safetensors").read_bytes()
    )
    with pytest.raises(StartupError, match="weights"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "swiglu"}, "config.json has 'swiglu', which the installed transformers"),
        ({"rope_scaling": {"type": "mrope"}}, "config.json has 'mrope', which the installed"),
        ({"pad_token_id": 128}, "pad_token_id in config.json is no id of the vocabulary"),
        ({"head_dim": 0}, "cannot be loaded: "),
    ],
    ids=str,
)
def test_values_that_no_model_can_be_made_of_are_one_line(change, reason, tiny, tmp_path) -> None:
    """For profile and plan each was a traceback, for engines "cannot be loaded: 'swiglu'"."""
    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    if "rope_scaling" in change:
        del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    for load in (load_model, meta_layers):
        with pytest.raises(StartupError) as caught:
            load(str(tmp_path))
        assert f"model {tmp_path}: {reason}" in caught.value.message
        assert "\n" not in caught.value.message


@torch.inference_mode()
def test_a_feature_layer_that_the_family_does_not_read_changes_nothing(tiny, tmp_path) -> None:
    """Gemma 3 reads the tower's last layer, which was emptied with those before: another answer."""
    shutil.copytree(tiny("gemma3"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_feature_layer": 1}))
    side = config["vision_config"]["image_size"]
    pixels = torch.randn(1, 3, side, side)
    one, other = (
        load_model(str(path)).core.get_image_features(pixels, return_dict=True).pooler_output
        for path in (tiny("gemma3"), tmp_path)
    )
    assert torch.equal(one, other)


def test_weights_of_another_shape_are_named(tiny, tmp_path) -> None:
    """It was "You set `ignore_mismatched_sizes` to `False`"."""
    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 64}))
    named = r"2 weights .*: lm_head\.weight is \[128, 32\] in the checkpoint, not \[64, 32\]; take"
    with pytest.raises(StartupError, match=named):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("gpu", "device 'gpu' is not known: use cpu or cuda"),
        ("cuda:99", "device 'cuda:99' is not there: PyTorch finds"),
    ],
)
def test_a_device_that_is_not_there_is_one_line(device: str, said: str, tmp_path: Path) -> None:
    """It was a traceback of PyTorch's, after all weights had been read."""
    with pytest.raises(StartupError, match=said):
        TorchRunner.load(str(tmp_path), device=device)


def test_dtype_is_that_of_the_checkpoint_or_as_asked(tiny) -> None:
    assert load_model(str(tiny("llama"))).dtype == torch.float32
    assert load_model(str(tiny("llama")), "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "no-such-type"}, {"tie_word_embeddings": 7}, {"id2label": 7}, {"auto_map": 7},
        {"quantization_config": "int4"}, {"model_type": ["llama"]},
    ],
    ids=str,
)  # fmt: skip
def test_fields_of_another_kind_are_refused_in_one_line(tiny, tmp_path, change) -> None:
    """Each was a traceback of another type."""
    config = json.loads((Path(tiny("llama")) / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(StartupError) as caught:
        read_config(str(tmp_path))
    assert f"model {tmp_path}: " in caught.value.message
    assert "\n" not in caught.value.message


def test_a_decoder_without_an_output_layer_embeds_and_generates_nothing(tiny, tmp_path) -> None:
    """As e5-mistral and its like are published. An incomplete checkpoint stays refused."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny("mistral_sliding"))
    whole.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_bytes())["architectures"] == ["MistralModel"]
    for task in ("generate", "both"):
        with pytest.raises(StartupError, match=r"without an output layer.*--task embed"):
            check_task(tmp_path, task)
    check_task(tmp_path, "embed")
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        wanted = whole.model(ids).last_hidden_state
        core = load_model(str(tmp_path)).core
        core.set_attn_implementation("sdpa")
        assert torch.allclose(core(ids).last_hidden_state, wanted, atol=1e-5)
    whole.save_pretrained(tmp_path, state_dict=whole.model.state_dict())
    with pytest.raises(StartupError, match=r"lm_head\.weight among them"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("layer", [-4, 3, [9]])
def test_a_vision_layer_that_is_not_there_is_named(layer, tiny, tmp_path) -> None:
    shutil.copytree(tiny("llava"), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vision_feature_layer": layer}))
    with pytest.raises(StartupError, match="has 2 layers: give -3 to 2"):
        load_model(str(tmp_path))
