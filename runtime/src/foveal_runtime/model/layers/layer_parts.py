"""Parts of a decoder layer, found by its modules' names.

For those who compute such a layer in another way than transformers (`decoder_layers`, `last_layer`,
`gpu_layer`); a `trial` shows whether the parts do what is expected of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foveal_runtime.model.attention import (
    LayerGeometry,
)
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.cpu.packing import DTYPES

Form = Mapping[str, str]
"""Role of a part → where a layer has it. Roles are those of `Layer` in the kernels."""
EXPERTS = "mlp.experts"
"""One part, whatever they are made of."""
ATTENTION: Form = {
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
}
HEAD_NORMS: Form = {"query": "self_attn.q_norm", "key": "self_attn.k_norm"}
_LLAMA: Form = {
    **ATTENTION,
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_LFM2: Form = {
    "before": "operator_norm",
    "after": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_ROUTED: Form = {"router": "mlp.gate", "experts": EXPERTS}
_SHARED: Form = {
    **_ROUTED,
    "shared": "mlp.shared_expert_gate",
    "gate": "mlp.shared_expert.gate_proj",
    "up": "mlp.shared_expert.up_proj",
    "down": "mlp.shared_expert.down_proj",
}
_DELTA: Form = {  # Qwen 3.5: a gated delta rule
    "before": "input_layernorm",
    "after": "post_attention_layernorm",
    "q": "linear_attn.in_proj_qkv",
    "k": "linear_attn.in_proj_b",
    "v": "linear_attn.in_proj_a",
    "z": "linear_attn.in_proj_z",
    "conv": "linear_attn.conv1d",
    "gated": "linear_attn.norm",
    "o": "linear_attn.out_proj",
}
LLAMA_LIKE: tuple[Form, ...] = (
    _LLAMA,
    {  # Gemma 2 and 3: a norm before and one behind each half of a layer
        **_LLAMA,
        "of_attention": "post_attention_layernorm",
        "after": "pre_feedforward_layernorm",
        "of_mlp": "post_feedforward_layernorm",
    },
)
FORMS: tuple[Form, ...] = (
    *LLAMA_LIKE,
    {
        **_LFM2,
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.out_proj",
        "query": "self_attn.q_layernorm",
        "key": "self_attn.k_layernorm",
    },
    {**_LFM2, "q": "conv.in_proj", "conv": "conv.conv", "o": "conv.out_proj"},
    {**_LLAMA, **_DELTA},
    {**ATTENTION, **_ROUTED},  # Qwen 3 and Mixtral with experts
    {**ATTENTION, **_SHARED},  # Qwen 3.5: one more that all rows go to
    {**_DELTA, **_SHARED},
)
"""Of layers that the kernel for whole layers computes on CPUs."""


class Unlike(Exception):
    """What makes a decoder unlike those that can be computed in another way."""


@contextmanager
def trying() -> Iterator[None]:
    """For trials: leaves chance as it was; whatever fails within makes a decoder Unlike, for a
    model that can be served by its modules must not fail to start."""
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            yield
        except Unlike:
            raise
        except Exception as error:  # a compiler's and a driver's are of their own types
            reason = " ".join(str(error).split())[:200]
            raise Unlike(f"a trial failed: {type(error).__name__}: {reason}") from error


def check_decoder(loaded: LoadedModel, num_layers: int, layers: Sequence[LayerGeometry]) -> None:
    """Raises Unlike where something other than its layers makes it unfit."""
    decoder: Any = loaded.decoder
    for name, kind in (("layers", nn.ModuleList), ("rotary_emb", nn.Module)):
        if not isinstance(getattr(decoder, name, None), kind):
            raise Unlike(f"its decoder has no {name}")
    last_norm(decoder)
    if loaded.adapter.correct_query is not None:
        raise Unlike("its family does more between the layers")
    if loaded.dtype not in DTYPES:
        raise Unlike(f"its dtype is {loaded.dtype}")
    if len(decoder.layers) != num_layers or any(layer.has_sinks for layer in layers):
        raise Unlike("its attention is another")


def last_norm(decoder: Any) -> nn.Module:
    """What the hidden state goes through behind the layers. Raises Unlike."""
    for name in ("norm", "embedding_norm"):
        if isinstance(found := getattr(decoder, name, None), nn.Module):
            return found
    raise Unlike("its decoder has no norm")


def has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(
        isinstance(one, QuantizedLinear) for one in module.modules()
    )


def parts_of(layer: nn.Module, forms: Sequence[Form], whole: str = "") -> dict[str, Any]:
    """The layer's innermost modules that have parameters, by their roles in the first form that
    names all of them; norms of heads may be missing. `whole`: a child that is one part.

    Raises Unlike.
    """
    found = dict(_innermost(layer, whole))
    for form in forms:
        places = {**HEAD_NORMS, **form}
        needed = {form[role] for role in form if role not in HEAD_NORMS}
        if needed <= found.keys() <= set(places.values()):
            return {role: found[at] for role, at in places.items() if at in found}
    odd = ", ".join(sorted(found.keys() ^ set(forms[0].values()))[:8])
    raise Unlike(f"{type(layer).__name__} is made of other parts ({odd})")


def _innermost(module: nn.Module, whole: str, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if not has_weights(child):
            continue
        here = f"{path}.{name}" if path else name
        deeper = [] if here == whole else list(_innermost(child, whole, here))
        yield from deeper or [(here, child)]


def rotation_of(decoder: Any, number: int) -> str:
    """The kind of a layer whose rotary embedding may be another than other layers'."""
    if "layer_type" not in inspect.signature(decoder.rotary_emb.forward).parameters:
        return ""
    kind: str = decoder.config.layer_types[number]
    return kind


def rotate(decoder: Any, rows: torch.Tensor, positions: torch.Tensor, kind: str) -> Any:
    """What layers of a kind take as position embeddings of rows (T, E): cosines and sines."""
    kinds = {"layer_type": kind} if kind else {}
    return decoder.rotary_emb(rows[None], positions, **kinds)


def deepstack_levels(loaded: LoadedModel) -> int:
    """How many layers take something of images: the first ones, unless the family says which."""
    if not loaded.adapter.deepstack:
        return 0
    if loaded.adapter.deepstack_at is not None:
        return len(loaded.adapter.deepstack_at(loaded.config))
    return len(loaded.config.vision_config.deepstack_visual_indexes)


def deepstack_arguments(
    loaded: LoadedModel, mask: torch.Tensor, levels: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """What the decoder takes for that: of which rows (T), and of each level (n, E)."""
    if loaded.adapter.deepstack_at is None:
        return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(levels)}
    layers = loaded.adapter.deepstack_at(loaded.config)
    added = dict(zip(layers, levels, strict=True))
    return {"vision_mask": mask[None, :, None], "deepstack_features": added}
