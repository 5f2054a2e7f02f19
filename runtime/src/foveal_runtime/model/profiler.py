"""Cost of a model: predicted from config.json and weight headers, or measured by running it.

Called by `main.profile` (and so by the operator's profile Job). Prediction loads no weights and
needs no GPU: the model is built on the meta device. The largest items come from the caller, which
may run processors. Never writes anything.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from foveal_runtime.engine.types.step import (
    EncoderInput,
    NewRequest,
    ScheduledRequest,
    StepPlan,
)
from foveal_runtime.model.attention import LayerGeometry, window_of, windowed_layers
from foveal_runtime.model.checkpoint.blocked import block_quantized
from foveal_runtime.model.checkpoint.dequantize import SCRATCH_BYTES, QuantizedLinear
from foveal_runtime.model.checkpoint.head import Head
from foveal_runtime.model.checkpoint.loader import LoadedModel, meta_model
from foveal_runtime.model.checkpoint.placement import converted_names, quantization_of
from foveal_runtime.model.checkpoint.probe import probe_layers, probe_states
from foveal_runtime.model.checkpoint.weights import copied_bytes, stored_bytes
from foveal_runtime.model.device import PeakMeter
from foveal_runtime.model.layers import mamba
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.model.runner.sequence import SequenceState
from foveal_runtime.model.runner.traits import read_traits
from foveal_runtime.model.sampling.sampler import Sampler
from foveal_runtime.plan.config import Quantization
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.plan.profile import ItemProfile, ModelProfile, ValueSource
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import meta_of, read_header

CONFIGURED = ("max_model_len", "kv_bytes_per_token", "embed_width", "embed_levels", "vocab_size")
FORMULAS = ("activation_bytes", "activation_bytes_per_token", "encoder_bytes_per_patch",
            "replicated_weight_bytes")  # fmt: skip
LOGIT_ROWS = 256
"""Rows of logits alive at once: a step's samples, or a piece of prompt logprobs."""
_LOGIT_COPIES = 3  # the head's own, a float32 one, and the sampler's pieces
_BLOCK_SIZE = 16


def predict(
    path: str,
    dtype: str = "auto",
    items: Mapping[str, ItemProfile] | None = None,
    device: str = "cpu",
    assume_dtype: str = "",
    quantization: Quantization = "auto",
) -> ModelProfile:
    """The profile of the checkpoint directory `path` without loading it.

    `assume_dtype`: the type that the weights would have, where there are none. Raises StartupError.
    """
    items = dict(items or {})
    has_weights = any(Path(path).glob("*.safetensors"))
    if assume_dtype and not has_weights:
        dtype = assume_dtype
    loaded = meta_model(path, dtype, quantization, device)
    head = Head(loaded.model, loaded.core_name)
    layers = probe_layers(loaded, head)
    state_bytes = sum(shape.size_bytes for shape in probe_states(loaded, head))
    traits = read_traits(loaded, state_bytes)
    itemsize = loaded.dtype.itemsize
    per_layer = tuple(layer.values_per_token * itemsize for layer in layers)
    window, window_bytes = _windows(layers, per_layer)
    rows = 0 if head.is_missing else LOGIT_ROWS
    decoder = _activations(loaded, layers, itemsize, device, rows)
    scheme = _scheme(loaded, device, quantization)
    if scheme or (assume_dtype and not has_weights):
        total = parameter_bytes(loaded.model)
    else:
        total = stored_bytes(path, itemsize) + _wide_bytes(loaded.model, itemsize)
    at_load = has_weights and quantization != "auto"
    sources: dict[str, ValueSource] = {
        **dict.fromkeys(FORMULAS, "formula"),
        **dict.fromkeys(CONFIGURED, "config"),
        **{f"items.{name}": "processor" for name in items},
        "weight_bytes": "headers" if has_weights else "config",
    }
    return ModelProfile(
        model=Path(path).name,
        dtype=str(loaded.dtype).removeprefix("torch."),
        is_multimodal=traits.is_multimodal,
        is_encoder=not traits.generates,
        max_model_len=traits.max_position,
        vocab_size=traits.vocab_size,
        weight_bytes=total,
        replicated_weight_bytes=min(total, replicated_bytes(loaded.model)),
        num_heads=math.gcd(*(layer.num_heads for layer in layers)),
        num_kv_heads=math.gcd(*(layer.num_kv_heads for layer in layers)),
        window=window,
        window_kv_bytes_per_token=window_bytes,
        window_pool=bool(window_of(layers)) and not state_bytes,
        kv_bytes_per_token=sum(per_layer),
        kv_bytes_per_layer=per_layer,
        state_bytes=state_bytes,
        embed_width=traits.embed_width,
        embed_bytes=itemsize,
        embed_levels=traits.embed_levels,
        quantization=scheme,
        load_bytes=_copied(path, dtype) if at_load else 0,
        activation_bytes=decoder.fixed + (SCRATCH_BYTES if scheme else 0),
        activation_bytes_per_token=decoder.whole + decoder.shared,
        activation_bytes_per_token_whole=decoder.whole,
        encoder_bytes_per_patch=_encoder_bytes(loaded.config, itemsize) if items else {},
        encoder_bytes_per_embed=3 * int(loaded.text_config.hidden_size) * itemsize,
        items=items,
        sources=sources,
        versions={name: version(name) for name in ("torch", "transformers")},
    )


def _copied(path: str, dtype: str) -> int:
    """Plain weights in host memory while they are quantised at load."""
    plain = meta_model(path, dtype)
    own = "BF16" if plain.dtype is torch.bfloat16 else f"F{8 * plain.dtype.itemsize}"
    return copied_bytes(path, own, converted_names(plain.model, path))


def _scheme(loaded: LoadedModel, device: str, quantization: Quantization) -> str:
    """The format of the weights, whose layers are laid out as `device` keeps them; "" = plain."""
    block_quantized(loaded.model, device.partition(":")[0])
    if quantization != "auto":
        return f"{quantization}, at load"
    return quantization_of(loaded.config)


def _windows(layers: Sequence[LayerGeometry], per_layer: Sequence[int]) -> tuple[int, int]:
    """The longest sliding window, and KV bytes of a token in layers that have one."""
    found = windowed_layers(layers) or {layer.index for layer in layers if layer.window}
    pairs = zip(per_layer, layers, strict=True)
    window = window_of(layers) or max(layer.window for layer in layers)
    return window, sum(size for size, layer in pairs if layer.index in found)


class _Decoder(NamedTuple):
    """Bytes of a step's peak: fixed, for each token on every rank, for each token of all ranks."""

    fixed: int
    whole: int
    shared: int


def _activations(
    loaded: LoadedModel,
    layers: Sequence[LayerGeometry],
    itemsize: int,
    device: str,
    logit_rows: int,
) -> _Decoder:
    """The decoder's peak in a step with so many rows of logits, as a bound, not a mean.

    Residual, normed input and three float32 temporaries of the norm; then either projections,
    rotated copies and output of attention, or four intermediates of the MLP, which ranks share; on
    CPUs one mask row over the context, as bool and as float32. Of each expert that a token goes to,
    four copies of its row, or one and four intermediates; on CPUs what the kernel takes of each
    pair of a row and an expert, where that is more. A Mamba-2 mixer's pieces.
    """
    text = loaded.text_config
    width, context = int(text.hidden_size), int(text.max_position_embeddings)
    heads = max(layer.num_heads * layer.key_dim for layer in layers)
    sizes = getattr(text, "intermediate_size", 0) or 4 * width
    inner = max(sizes) if isinstance(sizes, (list, tuple)) else int(sizes)
    if getattr(text, "use_double_wide_mlp", False):
        inner *= 2
    routed = getattr(text, "num_experts_per_tok", 0) or getattr(text, "top_k_experts", 0) or 0
    experts = 0
    if routed:
        each = getattr(text, "moe_intermediate_size", 0) or inner
        each = int(max(each) if isinstance(each, list | tuple) else each)
        experts = routed * max(4 * width, width + 4 * each)
        if device == "cpu":  # rows as numbers of two types, and one more expert for all
            shared = int(getattr(text, "shared_expert_intermediate_size", 0) or 0)
            pairs = (routed + bool(shared)) * (width + max(each, shared))
            experts = max(experts, 3 * pairs)
    whole = 12 * width + 2 * width * itemsize
    # Inputs of single layers: looked up, projected and added for all layers at once.
    inputs = int(getattr(text, "hidden_size_per_layer_input", 0) or 0) * text.num_hidden_layers
    whole += 3 * inputs * itemsize
    if device == "cpu":
        whole += 5 * context
    layer_kv_bytes = max(layer.values_per_token for layer in layers) * itemsize
    fixed = logit_rows * int(text.vocab_size) * 4 * _LOGIT_COPIES + context * layer_kv_bytes
    fixed += max(map(mamba.scratch_bytes, mamba.mixers_of(loaded.decoder)), default=0)
    return _Decoder(fixed, whole, max(6 * heads, 4 * inner, experts) * itemsize)


def _encoder_bytes(config: Any, itemsize: int) -> dict[str, int]:
    """Peak bytes of each modality's encoder for each patch: residual, normed input, projections and
    output of attention, two intermediates of the MLP. Or of convolutions over a spectrum (Qwen3's):
    the first one's channels of half the bins, before and after the activation, and a half more."""
    found = {}
    for name, modalities in (("vision_config", ("image", "video")), ("audio_config", ("audio",))):
        tower = getattr(config, name, None)
        if tower is None:
            continue
        inside = int(getattr(tower, "hidden_size", 0) or getattr(tower, "d_model", 0) or
                     config.get_text_config().hidden_size)  # fmt: skip
        inside = max(inside, int(getattr(tower, "embed_dim", 0) or 0))
        inner = int(getattr(tower, "intermediate_size", 0) or
                    getattr(tower, "encoder_ffn_dim", 0) or 4 * inside)  # fmt: skip
        convolved = int(getattr(tower, "downsample_hidden_size", 0) or 0) * (
            int(getattr(tower, "num_mel_bins", 0) or 0) // 2
        )
        each = max(8 * inside + 2 * inner, 5 * convolved // 2)
        found.update(dict.fromkeys(modalities, each * itemsize))
    return found


def measure(
    predicted: ModelProfile,
    path: str,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: Quantization = "auto",
    max_num_batched_tokens: int = 2048,
    values: Mapping[str, bytes] | None = None,
) -> ModelProfile:
    """`predicted` with what loading and running the model on `device` really costs.

    `values` are serialised largest items by modality; they are encoded to see that peak. Raises
    StartupError.
    """
    runner = TorchRunner.load(
        path, dtype=dtype, device=device, quantization=quantization, block_size=_BLOCK_SIZE
    )
    large = max(2, min(max_num_batched_tokens, runner.traits.max_position - 1))
    runner.allocate_kv(-(-large // _BLOCK_SIZE) + 1)
    meter = PeakMeter(device)
    _run_tokens(runner, 2)  # the first step allocates what stays
    small = max(1, large // 4)
    low = meter.peak_of(lambda: _run_tokens(runner, small))
    high = meter.peak_of(lambda: _run_tokens(runner, large))
    per_token = max(0, high - low) // max(1, large - small)
    per_patch = dict(predicted.encoder_bytes_per_patch)
    for name, value in (values or {}).items():
        peak = meter.peak_of(functools.partial(_run_encoder, runner, value))
        per_patch[name] = -(-peak // max(1, predicted.items[name].num_patches))
    logits = 0 if runner.head.is_missing else meter.peak_of(lambda: _run_sampler(runner))
    fixed = max(0, low - per_token * small, logits)
    sources = dict(predicted.sources)
    for name in ("weight_bytes", "activation_bytes", "activation_bytes_per_token",
                 "kv_bytes_per_token", "encoder_bytes_per_patch"):  # fmt: skip
        sources[name] = "measured"
    kv, weight_bytes = runner.kv_block_bytes // _BLOCK_SIZE, runner.weight_bytes
    runner.close()
    return msgspec.structs.replace(
        predicted,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=kv,
        activation_bytes=fixed,
        activation_bytes_per_token=per_token,
        activation_bytes_per_token_whole=per_token,
        encoder_bytes_per_patch=per_patch,
        encoder_bytes_per_embed=0,
        source="measured",
        sources=sources,
    )


def _run_tokens(runner: TorchRunner, count: int) -> None:
    """One step of one request with `count` prompt tokens that samples, or is embedded."""
    name = f"profile-{count}-{time.monotonic_ns()}"
    blocks = list(range(-(-count // _BLOCK_SIZE)))
    sampling = SamplingParams(
        max_tokens=1, temperature=1.0, pooling="" if runner.traits.generates else "mean"
    )
    request = NewRequest(name, [0] * count, count, (), (), sampling)
    runner.execute(
        StepPlan(0, new=[request], scheduled=[ScheduledRequest(name, 0, count, blocks, True)])
    )
    runner.execute(StepPlan(1, finished=[name]))


def _run_sampler(runner: TorchRunner) -> None:
    """The logits of a full step of decoding requests, and their tokens."""
    params = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, logprobs=5)
    states = [SequenceState(str(i), [0], 1, (), params) for i in range(LOGIT_ROWS)]
    width = int(runner.loaded.text_config.hidden_size)
    hidden = torch.zeros(LOGIT_ROWS, width, dtype=runner.loaded.dtype, device=runner.device)
    with torch.inference_mode():
        Sampler(()).sample(runner.head.logits(hidden), states)


def _run_encoder(runner: TorchRunner, value: bytes) -> None:
    meta = meta_of(read_header(value))
    assert 0 <= meta.modality < len(MODALITIES)
    key = b"profile".ljust(32, b"\0")
    runner.execute(StepPlan(0, encode=[EncoderInput(key, meta.modality, meta.num_embeds, value)]))
    runner.execute(StepPlan(1, free_encoder=[key]))


_SHARDED = ("colwise", "rowwise", "packed", "embedding")
"""Prefixes of the styles that cut a module's parameters; the others only move activations."""


def parameter_bytes(model: Any) -> int:
    """Bytes of all parameters, tied ones once, and of quantised weights as they are kept."""
    quantized = (one for one in model.modules() if isinstance(one, QuantizedLinear))
    held = [*model.parameters(), *(buffer for one in quantized for buffer in one.buffers())]
    return sum(one.numel() * one.element_size() for one in held)


def _wide_bytes(model: Any, itemsize: int) -> int:
    """What parameters take that are loaded in a wider type than the model's."""
    sizes = ((one.numel(), one.element_size() - itemsize) for one in model.parameters())
    return sum(count * more for count, more in sizes if more > 0)


def replicated_bytes(model: Any) -> int:
    """Bytes of the parameters that every rank holds in full; all of them without a plan."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    return sum(
        one.numel() * one.element_size()
        for name, one in model.named_parameters()
        if not _is_sharded(name, plan)
    )


def _is_sharded(name: str, plan: dict[str, str]) -> bool:
    generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    owner, _, last = generic.rpartition(".")
    style = plan.get(generic) or plan.get(owner) or ""
    return style.startswith(_SHARDED) and not (style.startswith("rowwise") and last == "bias")
