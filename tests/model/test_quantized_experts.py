"""Quantised experts compute what plain ones with their dequantised weights compute, and stay
quantised (tests/support/models/quantised.py)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.experts import QuantizedExperts
from foveal_runtime.model.checkpoint.quantized import UnsupportedQuantization
from foveal_runtime.model.profiler import parameter_bytes
from foveal_runtime.model.runner.runner import TorchRunner
from tests.support.models.bench import compare
from tests.support.models.quantised import make
from tests.support.models.quantised_experts import make_mxfp4, stacked_fp8
from tests.support.models.rerun_capturer import RerunCapturer

ONE_BY_ONE = (
    "deepseek_ocr2", "deepseek_v3_mla", "gemma4_moe", "glm4v_moe", "kimi_k25", "llama4",
    "llama4_text", "mistral3_latent", "mistral4", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_omni_moe_thinker",
    "qwen3_vl_moe",
)  # fmt: skip
FORMATS = ("fp8", "W4A16", "W4A16 asymmetric", "W8A8", "FP8 dynamic", "FP8 by block", "AWQ", "GPTQ")
STACKED = {"qwen3_vl_moe": stacked_fp8, "llama4_text": stacked_fp8}


@pytest.fixture
def pair(tiny, tmp_path):
    """pair(case, format) → the paths of the quantised checkpoint and of its plain twin; "MXFP4" is
    GPT-OSS's."""

    def made(case: str, name: str, **options):
        if name == "MXFP4":
            return make_mxfp4(Path(tiny(case)), tmp_path)
        return make(Path(tiny(case)), tmp_path, name, **options)

    return made


def experts_of(model: torch.nn.Module) -> list[QuantizedExperts]:
    return [one for one in model.modules() if isinstance(one, QuantizedExperts)]


def check(case: str, stored: Path, plain: Path, names: set[str]) -> None:
    bench = compare(case, stored, plain)
    model = bench.runner.loaded.model
    found = [layers for experts in experts_of(model) for layers in experts]
    assert found
    assert all(layers.keys() == names for layers in found)
    assert all(isinstance(layer, QuantizedLinear) for one in found for layer in one.values())
    predicted = profiler.predict(str(stored))
    assert predicted.weight_bytes == parameter_bytes(model)
    assert predicted.weight_bytes < 0.8 * profiler.predict(str(plain)).weight_bytes


ALONE = {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("case", ONE_BY_ONE)
def test_logits_are_those_of_the_dequantised_weights(case: str, pair) -> None:
    check(case, *pair(case, "fp8 blocks"), ALONE)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_experts(name: str, pair) -> None:
    check("qwen3_moe", *pair("qwen3_moe", name), ALONE)


@pytest.mark.parametrize(
    ("case", "name"),
    [("glm4v_moe", "FP8 dynamic"), ("kimi_k25", "W4A16"), ("llama4", "W4A16"),
     ("qwen3_vl_moe", "AWQ")],
)  # fmt: skip
def test_families_as_they_are_published(case: str, name: str, pair) -> None:
    check(case, *pair(case, name), ALONE)


@pytest.mark.parametrize("case", STACKED)
def test_experts_are_read_of_one_tensor(case: str, pair) -> None:
    check(case, *pair(case, "fp8 blocks", stack=STACKED[case]), {"gate_up_proj", "down_proj"})


def test_mxfp4_experts(pair) -> None:
    check("gpt_oss_sinks", *pair("gpt_oss_sinks", "MXFP4"), {"gate_up_proj", "down_proj"})


def rewrite(path: Path, change) -> None:
    """`change` gets the tensors of a checkpoint by name."""
    file = next(path.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def test_a_layer_may_have_plain_experts(pair) -> None:
    """As schemes leave the first or the last one."""
    stored, plain = pair("qwen3_moe", "fp8 blocks")
    given = load_file(next(plain.glob("*.safetensors")))

    def leave_the_first(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".0.mlp.experts." in name]:
            tensors.pop(name)
            tensors |= {} if name.endswith("_inv") else {name: given[name]}

    rewrite(stored, leave_the_first)
    bench = compare("qwen3_moe", stored, plain)
    assert len(experts_of(bench.runner.loaded.model)) == 1


def test_experts_of_layers_that_the_model_lacks_are_not_read(pair) -> None:
    """GLM's and DeepSeek's files have a layer more, for speculative decoding."""
    stored, plain = pair("qwen3_moe", "fp8 blocks")
    rewrite(stored, lambda tensors: tensors.update(
        {name.replace("s.1.", "s.2."): one.clone() for name, one in tensors.items()}
    ))  # fmt: skip
    bench = compare("qwen3_moe", stored, plain)
    assert len(experts_of(bench.runner.loaded.model)) == 2


GATE = "model.layers.0.mlp.experts.{}.gate_proj.weight_scale_inv"
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def swap_experts(tensors: dict[str, torch.Tensor]) -> None:
    one, other = GATE.format(1), GATE.format(2)
    tensors[one], tensors[other] = tensors[other], tensors[one]


def swap_blocks(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_scales"] = tensors[f"{STACK}_scales"].roll(1, 1)


@pytest.mark.parametrize(
    ("case", "name", "change"),
    [("qwen3_moe", "fp8 blocks", swap_experts), ("gpt_oss_sinks", "MXFP4", swap_blocks)],
)
def test_a_scale_of_another_expert_or_block_shows(case: str, name: str, change, pair) -> None:
    """The comparison must be able to fail."""
    stored, plain = pair(case, name)
    rewrite(stored, change)
    with pytest.raises(AssertionError):
        compare(case, stored, plain)


def test_only_experts_that_a_token_goes_to_are_multiplied_with(pair) -> None:
    loaded = TorchRunner.load(str(pair("qwen3_moe", "fp8 blocks")[0])).loaded
    (experts, *_) = experts_of(loaded.model)
    seen: dict[int, list[int]] = {}
    for number, layers in enumerate(experts):
        layers["down_proj"].register_forward_pre_hook(
            lambda _, args, number=number: seen.setdefault(number, []).append(len(args[0]))
        )
    chosen = torch.tensor([[3, 0], [0, 3], [3, 2]])
    with torch.inference_mode():
        experts(torch.randn(3, 32), chosen, torch.rand(3, 2))
    assert seen == {0: [2], 2: [1], 3: [3]}


def test_steps_whose_experts_the_host_reads_are_not_recorded(bench_of, caplog) -> None:
    runner = bench_of("qwen3_moe", "fp8 blocks")
    assert not runner.record_decoding(Frozen(), max_num_seqs=2, max_model_len=64)
    assert "the host reads which of the quantised experts a step needs" in caplog.text
    assert runner.record_decoding(RerunCapturer(), max_num_seqs=2, max_model_len=64)


@pytest.fixture
def bench_of(pair):
    def made(case: str, name: str) -> TorchRunner:
        return TorchRunner.load(str(pair(case, name)[0]), block_size=8, num_blocks=32)

    return made


class Frozen(RerunCapturer):
    is_frozen = True


def leave_one_plain(tensors: dict[str, torch.Tensor]) -> None:
    name = GATE.format(1)
    del tensors[name]
    weight = name.removesuffix("_scale_inv")
    tensors[weight] = tensors[weight].float()


def drop_a_bias(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{STACK}_bias"]


def cut_a_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_bias"] = tensors[f"{STACK}_bias"][1:].contiguous()


def drop_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "experts.gate_up_proj_" in name]:
        tensors[name] = tensors[name][1:].contiguous()


def drop_scales_of_an_expert(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_scales"] = tensors[f"{STACK}_scales"][1:].contiguous()


def cut_scales(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{STACK}_scales"] = tensors[f"{STACK}_scales"][:, 1:].contiguous()


def stack_in_fp8(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("experts.fc1.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


REFUSED = {
    "one is plain": ("qwen3_moe", "fp8 blocks", leave_one_plain, "of which 11 layers are quan"),
    "no bias": ("gpt_oss_sinks", "MXFP4", drop_a_bias, "experts.gate_up_proj_bias: missing"),
    "another bias": ("gpt_oss_sinks", "MXFP4", cut_a_bias, r"bias: F32 \[3, 128\]"),
    "an expert less": ("gpt_oss_sinks", "MXFP4", drop_an_expert, "of which 7 layers are quanti"),
    "no scales": ("gpt_oss_sinks", "MXFP4", drop_scales_of_an_expert, "scales: missing"),
    "fewer scales": ("gpt_oss_sinks", "MXFP4", cut_scales, r"scales: U8 \[127, 1\] instead of"),
    "two kinds": ("ernie4_5_vl_moe", "fp8 blocks", None, "transformers stacks with others"),
    "one tensor": ("aria", "fp8 blocks", stack_in_fp8, "one tensor of a larger module"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_experts_are_refused(case: str, pair) -> None:
    name, scheme, change, reason = REFUSED[case]
    stored, _ = pair(name, scheme)
    if change:
        rewrite(stored, change)
    for read in (profiler.predict, TorchRunner.load):
        with pytest.raises(UnsupportedQuantization, match=reason) as caught:
            read(str(stored))
        assert "\n" not in caught.value.message
