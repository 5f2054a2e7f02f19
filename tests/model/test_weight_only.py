"""Quantised weights by the C kernel on CPUs: as checkpoints bring them, or quantised at load.

Products are compared with the dequantised weights in double, models with transformers' forward of
them (checkpoints' own formats: test_quantized_layers.py).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from foveal_runtime.model import profiler
from foveal_runtime.model.checkpoint.blocked import block_quantized
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear, quantize_linears
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.cpu import packing
from foveal_runtime.model.cpu.kernels import DecoderKernel
from foveal_runtime.model.layers.decoder_layers import LIMITS, DecoderLayers
from foveal_runtime.plan.errors import StartupError
from tests.support.models.compiled import NEEDS_KERNEL, params_of, paths_of
from tests.support.models.decoders import made_of
from tests.support.models.quantised import make

pytestmark = NEEDS_KERNEL
KINDS = ["int8", "int4"]
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Of the largest result: the order of sums; in bfloat16 its rounding."""
SHAPES = [(64, 128), (96, 96), (80, 576), (16, 32), (200 * 16, 64)]
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 12, 13, 64, 97)
SIZES = {
    "vocab_size": 128, "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip


def layer_of(kind: str, outs: int, ins: int, has_zeros: bool = False) -> QuantizedLinear:
    torch.manual_seed(outs + ins)
    holder = nn.Sequential(nn.Linear(ins, outs)).requires_grad_(False)
    assert quantize_linears(holder, kind) == 1
    layer = holder[0]
    if has_zeros and kind == "int8":
        zeros = torch.randint(-9, 10, layer.weight_scale.shape, dtype=torch.int8)
        layer.register_buffer("weight_zero_point", zeros)
    elif has_zeros:
        words = torch.randint(-(1 << 31), (1 << 31) - 1, (outs // 8, layer.weight_scale.shape[1]))
        layer.register_buffer("weight_zero_point", words.int())
    return layer


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantised_weights(kind, has_zeros, dtype, monkeypatch):
    """Of every instruction set, and a row's is the same bits in any company."""
    for outs, ins in SHAPES:
        layer = layer_of(kind, outs, ins, has_zeros)
        layer.bias.data = layer.bias.data.to(dtype)
        weight = layer.dequantized()
        assert block_quantized(nn.Sequential(layer)) == 1
        torch.testing.assert_close(layer.dequantized(), weight, rtol=0, atol=0)
        rows = torch.randn(NUM_ROWS[-1] + 1, ins).to(dtype)
        wanted = rows.double() @ weight.double().t() + layer.bias.double()
        for kernel in map(DecoderKernel, paths_of("decoder_layers")):
            monkeypatch.setattr(packing, "loaded_kernel", lambda kernel=kernel: kernel)
            whole = layer(rows)
            apart = float((whole.double() - wanted).abs().max() / wanted.abs().max())
            assert apart <= BOUND[dtype], (outs, ins, kernel)
            for count in NUM_ROWS:
                assert torch.equal(layer(rows[1 : 1 + count]), whole[1 : 1 + count])


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_code_shows(kind):
    layer = layer_of(kind, 80, 576)
    weight = layer.dequantized()
    block_quantized(nn.Sequential(layer))
    layer.codes[0, 3, 5] ^= 2
    rows = torch.randn(4, 576)
    wanted = rows @ weight.t() + layer.bias
    assert float((layer(rows) - wanted).abs().max() / wanted.abs().max()) > 10 * BOUND[rows.dtype]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["qwen2_small", "qwen3_5_small", "llava"])
def test_a_model_quantised_at_load_is_its_dequantised_twin(
    case, kind, bench, checkpoints, monkeypatch
):
    """Llama-like decoders in one call, others by their modules; towers and heads stay plain."""
    for name, more in {"qwen2": {}, "qwen3_5_text": HYBRID}.items():
        config = transformers.AutoConfig.for_model(name, **SIZES, **more)
        small = checkpoints.Case(lambda config=config: config)
        monkeypatch.setitem(checkpoints.CASES, f"{name.removesuffix('_text')}_small", small)
    one = bench(case, attention="auto", quantization=kind)
    assert (one.runner.forward.decoder_layers is not None) == (case != "llava")
    found = {
        name: module
        for name, module in one.runner.loaded.model.named_modules()
        if isinstance(module, QuantizedLinear)
    }
    assert len(found) >= 6 * one.runner.loaded.text_config.num_hidden_layers
    assert not [name for name in found if "vision" in name or "head" in name]
    prompts = [one.prompt(1, num_text=40), one.prompt(2, num_text=9)]
    jobs = [one.job(str(number), prompt) for number, prompt in enumerate(prompts)]
    one.driver.run(jobs)
    with pytest.raises(AssertionError):  # the comparison sees the rounding
        one.check(jobs[0], prompts[0])
    for name, layer in found.items():
        one.reference.get_submodule(name).weight.data = layer.dequantized()
    for job, prompt in zip(jobs, prompts, strict=True):
        one.check(job, prompt)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", params_of("decoder_layers"))
def test_long_steps_are_one_call_where_codes_are_multiplied_as_fast(path, dtype, tiny, named):
    """By AVX-512 without pairs of bfloat16 numbers, codes are widened for each six rows."""
    kernel, folder = DecoderKernel(path), tiny(named("llama"))
    plain = DecoderLayers(*made_of(folder, dtype), kernel)
    made = DecoderLayers(*made_of(folder, dtype, "int4"), kernel)
    as_fast = dtype == "bfloat16" and path.stem.endswith(("_bf16", "_amx"))
    assert made.limits == (plain.limits if as_fast else LIMITS)
    assert made.takes_long == (plain.takes_long and (as_fast or "_v4" not in path.stem))


def test_plain_weights_are_planned_where_they_are_cast_first(tiny):
    path = str(tiny("llava"))
    stored = profiler.predict(path)
    assert profiler.predict(path, quantization="int8").load_bytes == stored.load_bytes == 0
    cast = profiler.predict(path, dtype="bfloat16", quantization="int8")
    assert cast.load_bytes == stored.weight_bytes // 2


def test_only_weights_that_are_cast_are_staged(tiny, tmp_path):
    """One integer buffer, or one tensor of another type, made the plan stage the whole model."""
    shutil.copytree(tiny("llama"), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    norms = {name: one.bfloat16() for name, one in tensors.items() if "norm" in name}
    buffer = {"model.layers.0.self_attn.rotary_emb.position_ids": torch.arange(512)}

    def staged(more, **options):
        save_file({**tensors, **more}, file, {"format": "pt"})
        return profiler.predict(str(tmp_path), **options).load_bytes

    assert staged(buffer, quantization="int8") == 0
    cast = sum(4 * one.numel() for one in norms.values())
    assert staged(buffer | norms, quantization="int8") == cast > 0
    assert staged(buffer | norms) == 0  # then they are the weights themselves


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_load_are_predicted(kind, tiny):
    path = str(tiny("llava"))
    predicted = profiler.predict(path, quantization=kind)
    held = load_model(path, quantization=kind).model
    unread = 16_352  # of a tower's last layer, which the engine drops
    assert predicted.weight_bytes == profiler.parameter_bytes(held) + unread
    assert predicted.weight_bytes < profiler.predict(path).weight_bytes
    assert predicted.quantization == f"{kind}, at load"
    assert predicted.possible_ranks() == (1,)


def test_what_is_quantised_is_not_quantised_again(tiny, tmp_path):
    stored, _ = make(Path(tiny("llama")), tmp_path, "W4A16")
    for read in (profiler.predict, load_model):
        with pytest.raises(StartupError, match=r"quantization int8: .* quantised already"):
            read(str(stored), quantization="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_linear_layers_is_refused(kind, tmp_path, monkeypatch):
    """GPT-2's layers are no nn.Linear: it was accepted, and ran as it was stored."""
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    load_model(str(tmp_path))
    monkeypatch.setattr("transformers.modeling_utils.safe_open", None)  # nothing reads a tensor
    for read in (profiler.predict, load_model):
        with pytest.raises(StartupError, match=rf"quantization {kind}: .* leave .* out") as caught:
            read(str(tmp_path), quantization=kind)
        assert caught.value.param == "quantization"


def test_without_a_kernel_layers_stay_as_they_are_stored(tiny, monkeypatch, caplog):
    monkeypatch.setattr(packing, "loaded_kernel", lambda: "no object for this machine")
    loaded = load_model(str(tiny("llama")), quantization="int4")
    layer = loaded.decoder.layers[0].mlp.gate_proj
    rows = torch.randn(3, layer.in_features)
    torch.testing.assert_close(layer(rows), rows @ layer.dequantized().t(), rtol=0, atol=2e-6)
    assert layer.layout.kind == "packed"
    assert "no object for this machine" in caplog.text
