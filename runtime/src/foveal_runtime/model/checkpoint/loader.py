"""Loads a checkpoint with transformers' own classes, or says in one line why it will not.

Called once by the runner. Never runs code from a checkpoint, never reads pickles (.bin, .pt), never
downloads anything. Refuses families whose decoders need state that a paged KV cache cannot hold.
"""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from foveal_runtime.model.adapters import ADAPTERS, PLAIN_TEXT, TEXT_ADAPTERS, Adapter
from foveal_runtime.model.attention.dense import switch_towers
from foveal_runtime.model.checkpoint.blocked import block_quantized
from foveal_runtime.model.checkpoint.dequantize import quantizable
from foveal_runtime.model.checkpoint.experts import quantize_decoder, quantized_experts
from foveal_runtime.model.checkpoint.kinds import (
    odd_padding,
    other_kind,
    unknown_kind,
    unserved_kind,
)
from foveal_runtime.model.checkpoint.placement import METHOD, fill_experts, place_layers
from foveal_runtime.model.checkpoint.quantized import check_quantization, describe
from foveal_runtime.model.checkpoint.rotary import settle_rope
from foveal_runtime.model.checkpoint.settings import (
    check_towers,
    keep_wide,
    settle_outputs,
    settle_part,
)
from foveal_runtime.model.checkpoint.weights import check_directory, check_report, check_weights
from foveal_runtime.model.context import ATTENTION_NAME
from foveal_runtime.model.cpu.experts import pack_experts
from foveal_runtime.model.cpu.fusing import fuse
from foveal_runtime.model.cpu.packing import own_rest, pack_linears
from foveal_runtime.plan.config import Quantization
from foveal_runtime.plan.embedder import ENCODERS, lacks_head, model_type
from foveal_runtime.plan.errors import StartupError

_log = logging.getLogger(__name__)
_LOAD_ERRORS = (  # of transformers while it makes a model, since it checks few fields itself
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, SafetensorError, TypeError, ValueError,
)  # fmt: skip
_CALL_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
STATE_TYPES = {"linear_attention", "conv", "hybrid"}
"""Layers with a recurrent state, "hybrid" ones with attention beside it; only families whose
adapter says so are served with them, and with layers that have neither."""
PLAIN_TYPES = {"moe", "mlp"}


@dataclass(slots=True)
class LoadedModel:
    """A model ready for paged attention.

    Attributes:
        model: the outermost class that turns hidden states into logits; `core_name` is the
            attribute that holds what lies below its head, "" for an encoder, which has none.
        core: has the feature methods, get_rope_index and the token embeddings.
        decoder: the text stack, set to paged attention; encoders keep their own.
        text_config: configuration of the decoder.
        path: the checkpoint's directory.
    """

    model: nn.Module
    core_name: str
    core: nn.Module
    decoder: nn.Module
    config: Any
    text_config: Any
    adapter: Adapter
    generation_config: Any = None
    path: str = ""

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.decoder.dtype
        return dtype

    def embed_tokens(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (T) to (T, E), before encoder outputs take their places."""
        if self.adapter.embed_tokens is not None:
            return self.adapter.embed_tokens(self.core, ids)
        core: Any = self.core
        embeds: torch.Tensor = core.get_input_embeddings()(ids)
        return embeds

    @property
    def rope_axes(self) -> int:
        """Rows of rope positions with mrope: three, or one for each of its sections; else 0."""
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        return len(rope.get("mrope_section") or "thw") if self.adapter.rope else 0

    def layer_inputs(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What decoder layers take of the token ids (T) themselves, as the decoder's arguments."""
        if self.adapter.layer_inputs is not None:
            return self.adapter.layer_inputs(self.config, ids)
        if not _layer_input_width(self.text_config):
            return {}
        decoder: Any = self.decoder
        return {"per_layer_inputs": decoder.get_per_layer_inputs(ids[None])}

    @property
    def placeholder_id(self) -> int | None:
        """The id in `layer_inputs` of tokens whose places encoder outputs take; None: their own."""
        if self.adapter.placeholder_id == "pad":
            return int(self.text_config.pad_token_id or 0)
        return None if self.adapter.placeholder_id == "own" else 0


def load_model(
    path: str,
    dtype: str = "auto",
    device: str = "cpu",
    quantization: Quantization = "auto",
    max_model_len: int = 0,
    **options: Any,
) -> LoadedModel:
    """Reads the checkpoint directory `path` for requests of at most `max_model_len` tokens (0: the
    model's own limit). `options` go to from_pretrained (tensor parallel).

    Raises StartupError for anything missing or unsupported.
    """
    config = read_config(path, quantization, max_model_len)
    adapter = adapter_for(config)
    model_class = class_for(config)
    check_class(config, model_class)
    check_weights(path)
    if quantization != "auto":  # before a weight is read
        quantizable(meta_model(path, dtype).decoder, quantization)
    try:
        model, report = model_class.from_pretrained(
            path,
            output_loading_info=True,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # check_report refuses them by name
            **class_options(model_class),
            **options,
        )
    except _LOAD_ERRORS as error:
        raise _unloadable(path, error) from error
    check_report(path, report, _head_of(model) if lacks_head(path) else ())
    loaded = replace(prepare(model.eval().requires_grad_(False), adapter), path=path)
    if not options:
        drop_unused_layers(model, config)
        if quantization != "auto":
            quantize_decoder(loaded.decoder, quantization, device)
        model = model.to(torch.device(device))
        num_blocked = block_quantized(model, model.device.type)
        if model.device.type == "cpu":
            switch_towers(loaded.core, loaded.decoder)
            if pack_linears(model) + pack_experts(model) + num_blocked:
                own_rest(model)
                fuse(model)
            for experts in quantized_experts(model):
                experts.use_kernel(loaded.dtype)
    return loaded


def _head_of(model: Any) -> list[str]:
    """Names of the output layer's parameters."""
    own = {id(one) for one in model.get_output_embeddings().parameters()}
    return [name for name, one in model.named_parameters() if id(one) in own]


def meta_model(
    path: str, dtype: str = "auto", quantization: Quantization = "auto", device: str = "cpu"
) -> LoadedModel:
    """The checkpoint's model as it would be on a device, its parameters without values.

    Raises StartupError for models that could not be loaded either.
    """
    config = read_config(path, quantization)
    model_class = class_for(config)
    check_class(config, model_class)
    adapter = adapter_for(config)
    kind = DTYPES.get(dtype) or _config_dtype(config)
    with torch.device("meta"):
        try:
            model = model_class._from_config(config, dtype=kind, **class_options(model_class))
            keep_wide(model, kind)
        except _LOAD_ERRORS as error:
            raise _unloadable(path, error) from error
        if quantized := getattr(config, "quantization_config", None):
            place_layers(model, path, quantized["scheme"])
            fill_experts(model, path)
    loaded = replace(prepare(model.eval().requires_grad_(False), adapter), path=path)
    if quantization != "auto":
        quantize_decoder(loaded.decoder, quantization, device, lays_out=False)
    return loaded


def _config_dtype(config: object) -> torch.dtype:
    for one in (config, config.get_text_config()):  # type: ignore[attr-defined]
        kind = getattr(one, "dtype", None)
        if isinstance(kind, torch.dtype):
            return kind
    return torch.float32


def prepare(model: Any, adapter: Adapter) -> LoadedModel:
    """Finds core, decoder and head and switches the decoder to paged attention."""
    core, outer = model.base_model, model
    if adapter.is_encoder:
        decoder = core
        _number_layers(core)
    elif core is model:
        # Llama 4: a causal model under a prefix that it does not have, or such a model inside.
        outer = getattr(model, "language_model", model)
        decoder = outer.model
        core = decoder if outer is model else model
    else:
        decoder = core.get_decoder()
    inner = core if outer is model else decoder
    core_name = next((name for name, module in outer.named_children() if module is inner), "")
    assert core_name or adapter.is_encoder
    decoder.set_attn_implementation(ATTENTION_NAME)
    return LoadedModel(
        model=outer,
        core_name=core_name,
        core=core,
        decoder=decoder,
        config=model.config,
        text_config=model.config.get_text_config(),
        adapter=adapter,
        generation_config=getattr(model, "generation_config", None),
    )


def _number_layers(encoder: Any) -> None:
    """Attention of some encoders does not know which layer's it is."""
    for number, layer in enumerate(_layers(encoder, encoder.config.num_hidden_layers) or ()):
        for module in layer.modules():
            if hasattr(module, "is_causal") and not hasattr(module, "layer_idx"):
                module.layer_idx = number


def read_config(path: str, quantization: Quantization = "auto", max_model_len: int = 0) -> Any:
    """The checkpoint's configuration, with rotary positions for requests of at most `max_model_len`
    tokens (0: the model's own limit). Raises StartupError, also for quantised weights that cannot
    be run, or quantised once more; for others it names our quantiser (`placement`)."""
    check_directory(path)
    try:
        found = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # of whatever type: each family reads its fields in its own way
        if (kind := model_type(path)) and kind not in CONFIG_MAPPING_NAMES:
            raise StartupError(unknown_kind(path, kind, CONFIG_MAPPING_NAMES)) from error
        raise StartupError(
            f"model {path}: config.json is not one that the installed transformers knows "
            f"(code from checkpoints is never run): {_one_line(error)}"
        ) from error
    found = settle_part(found)
    check_towers(path, found)
    settle_outputs(found)
    settle_rope(found.get_text_config(), max_model_len)
    if scheme := check_quantization(path, found):
        if quantization != "auto":
            raise StartupError(
                f"quantization {quantization}: the weights of {path} are quantised already "
                f"({describe(scheme)}); leave it out",
                param="quantization",
            )
        # Instead of transformers' own quantiser of the method, which widens weights or needs more.
        found.quantization_config = {"quant_method": METHOD, "path": path, "scheme": scheme}
    return found


def adapter_for(config: Any) -> Adapter:
    """The family's adapter. Raises StartupError for multimodal families that have none."""
    kind = config.model_type
    if kind in ADAPTERS:
        found, text = ADAPTERS[kind], config.get_text_config()
        if found.groups_if and text.use_bidirectional_attention != found.groups_if:
            return replace(found, bidirectional="none")
        return found
    multimodal = type(config) in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING
    is_known = kind in TEXT_ADAPTERS
    if config.get_text_config() is not config or (multimodal and not is_known):
        raise StartupError(unserved_kind(kind))
    adapter = TEXT_ADAPTERS.get(kind, PLAIN_TEXT)
    if adapter.starts_after_padding:
        if problem := odd_padding(kind, config.pad_token_id, config.vocab_size):
            raise StartupError(problem)
        return replace(adapter, position_offset=int(config.pad_token_id) + 1)
    return adapter


def class_for(config: Any) -> Any:
    """The transformers class that serves this configuration. Raises StartupError."""
    if config.model_type in ENCODERS:
        return modeling_auto.MODEL_MAPPING[type(config)]
    for mapping in (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
    ):
        if type(config) in mapping:
            return mapping[type(config)]
    # Some decoders that listen are listed as sequence-to-sequence models only.
    mapping = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    if config.model_type in ADAPTERS and type(config) in mapping:
        return mapping[type(config)]
    raise StartupError(other_kind(config.model_type))


def class_options(model_class: Any) -> dict[str, Any]:
    """Encoders are made without the pooler of their pre-training, which nobody reads."""
    takes = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if takes else {}


def check_class(config: Any, model_class: Any) -> None:
    """Refuses what a paged KV cache cannot serve. Raises StartupError naming the feature."""
    text = config.get_text_config()
    reason = ""
    adapter = {**TEXT_ADAPTERS, **ADAPTERS}.get(config.model_type, PLAIN_TEXT)
    has_state = adapter.has_state
    positions = getattr(text, "position_embedding_type", None) or "absolute"
    known = LAYER_TYPES | STATE_TYPES | PLAIN_TYPES if has_state else LAYER_TYPES
    layer_types = set(getattr(text, "layer_types", None) or ()) - known
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "is_encoder_decoder", False):
        reason = "encoder-decoder models with cross-attention"
    elif adapter.is_encoder and getattr(text, "is_decoder", False):
        reason = "an encoder that is set up as a decoder (is_decoder)"
    elif adapter.is_encoder and positions != "absolute":
        reason = f"positions of kind {positions}"
    elif getattr(text, "cross_attention_layers", None) or getattr(
        text, "add_cross_attention", False
    ):
        reason = "cross-attention layers"
    elif getattr(model_class, "_is_stateful", False) and not has_state:
        reason = "recurrent or state-space layers"
    elif layer_types:
        reason = f"layers of type {', '.join(sorted(layer_types))}"
    elif (
        getattr(text, "use_bidirectional_attention", False) not in (None, False, "vision")
        and adapter_for(config).bidirectional == "none"
    ):
        reason = "text attention in both directions"
    elif _layer_input_width(text) and not adapter.has_layer_inputs:
        reason = "per-layer token embeddings"
    elif not (
        getattr(model_class, "_supports_attention_backend", False)
        or config.model_type in ADAPTERS
        or has_state
    ):
        reason = f"attention of {model_class.__name__} that cannot be replaced"
    if reason:
        raise StartupError(f"model_type {config.model_type!r} is not supported: {reason}")


def _layer_input_width(text_config: Any) -> int:
    return int(getattr(text_config, "hidden_size_per_layer_input", 0) or 0)


def _unloadable(path: str, error: Exception) -> StartupError:
    if isinstance(error, KeyError):  # its text is the name alone
        named = f"config.json has {error}, which the installed transformers does not know"
        return StartupError(f"model {path}: {named}")
    if "Padding_idx" in str(error):
        return StartupError(
            f"model {path}: pad_token_id in config.json is no id of the vocabulary; set it to null"
        )
    reason = _one_line(error) or type(error).__name__
    return StartupError(f"model {path}: cannot be loaded: {reason}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def drop_unused_layers(model: Any, config: Any) -> int:
    """Empties the tower's layers after the last that is read; returns how many: 0 where the family
    reads the last one, whatever config.json says, or where a trial gives other features."""
    wanted = getattr(config, "vision_feature_layer", None)
    vision, core = getattr(config, "vision_config", None), model.base_model
    tower, method = (getattr(core, n, None) for n in ("vision_tower", "get_image_features"))
    layers = None if tower is None else _layers(tower, getattr(vision, "num_hidden_layers", None))
    is_read = method and "vision_feature_layer" in inspect.signature(method).parameters
    if layers is None or wanted is None or not is_read or adapter_for(config).deepstack:
        return 0  # with deepstack, others are read, too
    count = len(layers)
    given = [wanted] if isinstance(wanted, int) else wanted
    if outside := [i for i in given if not -count - 1 <= i <= count]:
        raise StartupError(
            f"vision_feature_layer in config.json is {outside[0]}, and the vision tower has "
            f"{count} layers: give {-count - 1} to {count}"
        )
    # Feature 0 is what goes into the first layer, feature n what comes out of the n-th.
    read = [i % (count + 1) for i in given]
    unused = list(layers)[max(read) :]
    if not unused:
        return 0
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        side = getattr(vision, "image_size", None)
        channels = getattr(vision, "num_channels", 3)
        if not isinstance(side, int):
            return 0
        pixels = torch.randn(1, channels, side, side).to(model.dtype)
        before = _features(tower, pixels, read)
        for layer in unused:
            layer.forward = hand_on
        after = None if before is None else _features(tower, pixels, read)
    if before is None or after is None or not all(map(torch.equal, before, after)):
        for layer in unused:
            del layer.forward
        return 0
    for layer in unused:
        layer._modules.clear()
    _log.info("%d of %d layers of the vision tower are not read and left out", len(unused), count)
    return len(unused)


def hand_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _layers(tower: nn.Module, count: int | None) -> nn.ModuleList | None:
    """The tower's one list of `count` layers."""
    lists = [m for m in tower.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    return lists[0] if len(lists) == 1 else None


def _features(tower: Any, pixels: torch.Tensor, read: list[int]) -> list[torch.Tensor] | None:
    try:
        states = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        return [states[i] for i in read]
    except _CALL_ERRORS:
        return None
