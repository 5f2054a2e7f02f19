"""Quantised checkpoints are refused in one line by everything that reads a checkpoint."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from foveal_runtime.main import cli
from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint import loader, placement, quantized
from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.errors import StartupError

PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}},
    },
}
NVFP4 = {**PACKED, "format": "nvfp4-pack-quantized"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
READERS = {
    "profile": profiler.predict,
    "engine": TorchRunner.load,
    "tensor-parallel engine": lambda path: TensorParallelRunner.load(path, 2),
}


def quantised(source: Path, target: Path, scheme: object, part: str = "") -> str:
    """A copy of a checkpoint whose config.json declares `scheme`."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (config[part] if part else config)["quantization_config"] = scheme
    (target / "config.json").write_text(json.dumps(config))
    return str(target)


def refusal(read, path: str) -> str:
    with pytest.raises(quantized.UnsupportedQuantization) as caught:
        read(path)
    assert "\n" not in caught.value.message
    return caught.value.message


REFUSED = AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - quantized.LOADERS.keys() - {placement.METHOD}


def test_every_loader_is_a_method_of_transformers() -> None:
    assert quantized.LOADERS.keys() < AUTO_QUANTIZATION_CONFIG_MAPPING.keys()
    assert len(REFUSED) >= 22


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_every_other_method_of_transformers_is_refused_by_name(method: str, tiny, tmp_path) -> None:
    """`predict` said that compressed-tensors, GPTQ and AWQ models fit, and the engine then ended in
    a traceback; an FP8 model was widened to twice its planned bytes."""
    path = quantised(tiny("llama"), tmp_path / "model", {"quant_method": method, "bits": 4})
    name = "bitsandbytes" if method.startswith("bitsandbytes") else method
    assert f"weights are quantised ({name}" in refusal(profiler.predict, path)


@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize(
    "scheme", [NVFP4, {"quant_method": "mxfp8"}, {"load_in_4bit": True}], ids=str
)
def test_profile_and_engine_give_the_same_answer(reader: str, scheme, tiny, tmp_path) -> None:
    path = quantised(tiny("llava"), tmp_path / "model", scheme)
    assert refusal(READERS[reader], path) == refusal(loader.read_config, path)


def test_no_tensor_is_read_before_the_refusal(tiny, tmp_path) -> None:
    path = quantised(tiny("llama"), tmp_path / "model", NVFP4)
    known = quantised(tiny("llama"), tmp_path / "known", PACKED)
    for folder in (path, known):
        for file in Path(folder).glob("*.safetensors"):
            file.unlink()
    message = refusal(TorchRunner.load, path)
    assert "(compressed-tensors, nvfp4-pack-quantized, int4, groups of 128" in message
    for read in (profiler.predict, TorchRunner.load):
        assert "put the *.safetensors there" in refusal(read, known)


@pytest.mark.parametrize("part", ["text_config", "vision_config"])
def test_a_scheme_of_a_part_counts(part: str, tiny, tmp_path) -> None:
    path = quantised(tiny("llava"), tmp_path / "model", {**FP8, "quant_method": "quark"}, part)
    assert "(quark, blocks of 128x128)" in refusal(profiler.predict, path)


def test_a_scheme_in_a_file_beside_the_configuration_counts(tiny, tmp_path) -> None:
    """TensorRT's Model Optimizer writes hf_quant_config.json and leaves config.json alone."""
    shutil.copytree(tiny("llama"), tmp_path / "model")
    scheme = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(scheme))
    assert "(modelopt, NVFP4)" in refusal(profiler.predict, str(tmp_path / "model"))


def test_fp8_tensors_without_a_scheme_are_not_widened_silently(tiny, tmp_path) -> None:
    shutil.copytree(tiny("llama"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, {"format": "pt"})
    for read in (profiler.predict, TorchRunner.load):
        assert "F8_E4M3 tensors" in refusal(read, str(tmp_path / "model"))


def test_the_command_prints_one_line(tiny, tmp_path, capsys) -> None:
    path = quantised(tiny("llama"), tmp_path / "model", NVFP4)
    assert cli.main(["profile", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "compressed-tensors" in err


def test_a_missing_package_is_one_line(tiny, monkeypatch) -> None:
    """transformers raises ImportError for what it cannot load without an optional package."""

    def absent(*_: object, **__: object) -> None:
        raise ImportError("needs a package that is not installed")

    model_class = loader.class_for(loader.read_config(str(tiny("llama"))))
    monkeypatch.setattr(model_class, "from_pretrained", absent)
    with pytest.raises(StartupError, match="cannot be loaded: needs a package"):
        loader.load_model(str(tiny("llama")))


ODD = [None, True, 1, 1.5, "x", ["x"], [[1]], {"a": 1}]
SCHEMES = [
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {},
     "sparsity_config": {}, "transform_config": {}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_a_scheme_of_any_json_is_taken_or_refused_in_a_line(odd: Any, tmp_path: Path) -> None:
    """A scheme that was no mapping, or a list where a word belongs, was a traceback."""
    configs: list[dict[str, Any]] = [{"quantization_config": odd}, {"sub_configs": odd}]
    for scheme in SCHEMES:
        configs += [{"quantization_config": {**scheme, name: odd}} for name in scheme]
    for config in configs:
        with contextlib.suppress(quantized.UnsupportedQuantization):
            quantized.check_declared(str(tmp_path), SimpleNamespace(**config))
    for name in ("hf_quant_config.json", "quantize_config.json"):
        (tmp_path / name).write_text(json.dumps({"quantization": odd}))
        with contextlib.suppress(quantized.UnsupportedQuantization):
            quantized.check_declared(str(tmp_path), SimpleNamespace())
        (tmp_path / name).unlink()
