"""Quantised checkpoints compute what plain ones with their dequantised weights compute.

Each is written in its format's published layout, and compared, through the runner, with
transformers' forward of the plain twin (tests/support/models/quantised.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint import dequantize
from foveal_runtime.model.checkpoint.blocked import block_quantized
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import meta_model
from foveal_runtime.model.checkpoint.quantized import UnsupportedQuantization
from foveal_runtime.model.parallel.tensor_parallel import TensorParallelRunner
from foveal_runtime.model.profiler import parameter_bytes
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.errors import StartupError
from tests.support.models.bench import compare
from tests.support.models.quantised import FORMATS, make

MULTIMODAL = ("fp8 blocks", "W4A16 asymmetric", "W8A8", "AWQ", "GPTQ ordered by activations")


@pytest.fixture
def pair(tiny, tmp_path):
    """pair(case, format) → the paths of the quantised checkpoint and of its plain twin."""
    return lambda case, name, **options: make(Path(tiny(case)), tmp_path, name, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_weights(name: str, pair) -> None:
    bench = compare("llama", *pair("llama", name))
    kinds = {n: type(m) for n, m in bench.runner.loaded.model.named_modules()}
    quantised = [n for n, kind in kinds.items() if kind is QuantizedLinear]
    assert len(quantised) == 13  # of 14: what `ignore` names stays plain
    assert kinds["model.layers.1.mlp.down_proj"] is not QuantizedLinear
    assert kinds["lm_head"] is not QuantizedLinear


@pytest.mark.parametrize("name", MULTIMODAL)
@pytest.mark.parametrize("case", ["llava", "qwen2_vl", "qwen2_5_omni"])
def test_towers_stay_plain(case: str, name: str, pair) -> None:
    bench = compare(case, *pair(case, name))
    loaded = bench.runner.loaded
    quantised = [n for n, m in loaded.model.named_modules() if isinstance(m, QuantizedLinear)]
    assert len(quantised) == 13
    assert not [n for n in quantised if "vis" in n or "tower" in n]


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_known_from_headers(name: str, pair, monkeypatch) -> None:
    stored, plain = pair("llama", name)
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.safe_open", None)  # nothing reads a tensor
        predicted = profiler.predict(str(stored))
    held = TorchRunner.load(str(stored)).weight_bytes
    assert abs(predicted.weight_bytes - held) <= 0.03 * held
    assert held < 0.8 * profiler.predict(str(plain)).weight_bytes
    assert predicted.quantization.startswith(FORMATS[name].scheme["quant_method"])
    assert predicted.sources["weight_bytes"] == "headers"


@pytest.mark.parametrize(
    "name", ["W4A16", "W4A16 ordered by activations", "GPTQ", "GPTQ ordered by activations"]
)
def test_plans_lay_out_what_engines_do(name: str, pair) -> None:
    """`actorder` was planned as if its inputs were in order."""
    stored, _ = pair("llama", name)
    planned = meta_model(str(stored)).model
    blocked = block_quantized(planned)
    held = TorchRunner.load(str(stored)).loaded.model
    for one, other in zip(layers_of(planned), layers_of(held), strict=True):
        assert one.layout == other.layout
        assert one.layout.is_reordered == ("ordered" in name)
    assert parameter_bytes(planned) == parameter_bytes(held)
    assert not ("ordered" in name and blocked)


def layers_of(model: torch.nn.Module) -> list[QuantizedLinear]:
    return [one for one in model.modules() if isinstance(one, QuantizedLinear)]


def shift_zero_points(parts: dict[str, torch.Tensor]) -> None:
    parts["qzeros"] = parts["qzeros"] ^ 0x11111111


def reverse_groups(parts: dict[str, torch.Tensor]) -> None:
    name = next(name for name in parts if name.endswith("g_idx"))
    parts[name] = parts[name].flip(0)


def swap_scales(parts: dict[str, torch.Tensor]) -> None:
    name = next(name for name in parts if "scale" in name)
    parts[name] = parts[name].roll(1, -1) if parts[name].dim() > 1 else parts[name] * 1.01


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("GPTQ", shift_zero_points),
        ("GPTQ v2", shift_zero_points),
        ("AWQ", shift_zero_points),
        ("GPTQ", reverse_groups),
        ("GPTQ ordered by activations", reverse_groups),
        ("W4A16", swap_scales),
        ("W4A16 ordered by activations", reverse_groups),
        ("fp8 blocks", swap_scales),
    ],
)
def test_a_wrong_zero_point_or_group_shows(name: str, change, pair) -> None:
    """The comparison must be able to fail."""
    with pytest.raises(AssertionError):
        compare("llama", *pair("llama", name, change=change))


def unset_groups(parts: dict[str, torch.Tensor]) -> None:
    parts["weight_g_idx"] = torch.full((parts["weight_packed"].shape[1] * 8,), -1).int()


def test_groups_of_minus_one_are_inputs_in_their_order(pair) -> None:
    """As files of compressed-tensors have them that know no other order: every input took the last
    group's scale, and answers were nonsense."""
    bench = compare("llama", *pair("llama", "W4A16", change=unset_groups))
    assert {layer.layout.kind for layer in layers_of(bench.runner.loaded.model)} == {"blocked"}


@pytest.mark.parametrize("name", ["GPTQ", "W4A16 ordered by activations"])
def test_a_group_without_scales_is_refused(name: str, pair) -> None:
    """It was an IndexError in the engine's first step."""

    def count_from_nine(parts: dict[str, torch.Tensor]) -> None:
        group = next(part for part in parts if part.endswith("g_idx"))
        parts[group] = parts[group] + 9

    stored, _ = pair("llama", name, change=count_from_nine)
    with pytest.raises(
        UnsupportedQuantization, match=r"groups 9 to \d+, with \d+ scales"
    ) as caught:
        TorchRunner.load(str(stored))
    assert "\n" not in caught.value.message


def test_a_wrong_order_of_codes_shows(pair, monkeypatch) -> None:
    monkeypatch.setattr(dequantize, "_AWQ_PLACES", tuple(range(8)))
    with pytest.raises(AssertionError):
        compare("llama", *pair("llama", "AWQ"))


def test_gptq_zero_points_are_read_as_their_version_stores_them(pair) -> None:
    stored, plain = pair("llama", "GPTQ")
    edit(stored, checkpoint_format="gptq_v2")
    with pytest.raises(AssertionError):
        compare("llama", stored, plain)


@pytest.mark.parametrize("name", ["fp8 blocks", "W8A16 asymmetric", "AWQ", "GPTQ"])
def test_blocks_of_any_size_give_the_same(name: str, pair, monkeypatch) -> None:
    runner = TorchRunner.load(str(pair("llama", name)[0]))
    layer = runner.loaded.decoder.layers[0].mlp.gate_proj
    rows = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0))
    whole = layer(rows)
    monkeypatch.setattr(dequantize, "BLOCK_NUMBERS", 1)
    torch.testing.assert_close(layer(rows), whole, rtol=0, atol=2e-6)
    torch.testing.assert_close(rows @ layer.dequantized().t(), whole, rtol=0, atol=2e-6)


def edit(path: Path, **changes: object) -> str:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 16}}
REFUSED = {
    "transforms": ("W4A16", {"transform_config": {"config_groups": {"R1": {}}}}, "transforms"),
    "2:4": ("W4A16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse"),
    "nvfp4": ("W4A16", {"format": "nvfp4-pack-quantized"}, "format nvfp4-pack-quantized"),
    "gemv": ("AWQ", {"version": "gemv"}, "version gemv"),
    "three bits": ("GPTQ", {"bits": 3}, "bits 3"),
    "marlin": ("GPTQ", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
    "groups": ("GPTQ", {"group_size": 32}, r"qzeros: I32 \[3, 4\] instead of I32 \[2, 4\]"),
    "blocks": ("fp8 blocks", {"weight_block_size": [32, 32]}, "weight_scale_inv: F32"),
    "zero points": (
        "W4A16",
        {"config_groups": {"a": {**GROUP, "weights": {**GROUP["weights"], "symmetric": False}}}},
        "weight_zero_point: missing",
    ),
    "targets": ("W4A16", {"config_groups": {"a": {**GROUP, "targets": ["re:x"]}}}, "no group"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_stored_another_way_is_refused(case: str, pair) -> None:
    """By profile and engine alike, in one line, before a tensor is read."""
    name, changes, reason = REFUSED[case]
    path = edit(pair("llama", name)[0], **changes)
    for read in (profiler.predict, TorchRunner.load):
        with pytest.raises(UnsupportedQuantization, match=reason) as caught:
            read(path)
        assert "\n" not in caught.value.message


def test_ranks_are_refused_before_they_start(pair) -> None:
    stored, _ = pair("llama", "W4A16")
    with pytest.raises(StartupError, match=r"tensor_parallel 2: quantised weights .* one device"):
        TensorParallelRunner.load(str(stored), 2)
    assert profiler.predict(str(stored)).possible_ranks() == (1,)
