"""Parts of a decoder layer, and a trial of what its modules compute.

For those who compute such a layer in another way than transformers (`decoder_layers`, `last_layer`,
`gpu_layer`): they look at its modules' names to find the parts, and at a trial's numbers to know
that these parts do what is expected of them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foveal_runtime.model.attention import (
    AttentionBackend,
    ForwardContext,
    KVPool,
    LayerGeometry,
)
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.checkpoint.dequantize import QuantizedLinear
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.context import PagedCall, forward_context
from foveal_runtime.model.cpu.fusing import TOLERANCE
from foveal_runtime.model.cpu.packing import DTYPES

if TYPE_CHECKING:
    from foveal_runtime.model.layers.state import States

Form = Mapping[str, str]
"""Role of a part → where a layer has it. Roles are those of `Layer` in the kernels."""
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
    {  # Qwen 3.5: a gated delta rule
        **_LLAMA,
        "q": "linear_attn.in_proj_qkv",
        "k": "linear_attn.in_proj_b",
        "v": "linear_attn.in_proj_a",
        "z": "linear_attn.in_proj_z",
        "conv": "linear_attn.conv1d",
        "gated": "linear_attn.norm",
        "o": "linear_attn.out_proj",
    },
)
"""Of layers that the kernel for whole layers computes on CPUs."""
_BLOCK_TOKENS = 16
_WHOLE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference over mean size after all layers: shows what is done around the layers (a scaled
embedding), not last bits, which the trials of single layers show."""
_CALL_ERRORS = (
    AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


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
        except _CALL_ERRORS as error:
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
    """How many of the first layers take something of images."""
    if not loaded.adapter.deepstack:
        return 0
    return len(loaded.config.vision_config.deepstack_visual_indexes)


def _deepstack(loaded: LoadedModel, rows: torch.Tensor) -> dict[str, Any]:
    """As if every other row were of an image."""
    mask = torch.arange(len(rows), device=rows.device) % 2 == 0
    levels = [torch.randn_like(rows[mask]) / 16 for _ in range(deepstack_levels(loaded))]
    return {"visual_pos_masks": mask[None], "deepstack_visual_embeds": levels}


class Trial:
    """Random rows of some sequences, in a small KV pool of random contexts.

    Attributes:
        rows: (T, E). Small, so that what a layer adds is larger than what it is added to; its norms
            take the size away.
        extra: what the first layers take of images, where a family's do.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[LayerGeometry],
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        states: States | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        """`backend`: what both ways attend by; None: the reference."""
        self._states = states if states is not None and states.shapes else None
        self._loaded = loaded
        self._layers = layers
        count, dtype = len(kv_lens), loaded.dtype
        num_blocks = -(-max(kv_lens) // _BLOCK_TOKENS)
        there = next(loaded.decoder.parameters()).device
        self.pool = KVPool(layers, num_blocks * count + 1, _BLOCK_TOKENS, dtype, there)
        for one in (*self.pool.keys, *self.pool.values):
            one.copy_(torch.randn(one.shape))
        table = torch.arange(1, num_blocks * count + 1, dtype=torch.int32).view(count, num_blocks)
        pairs = zip(q_lens, kv_lens, strict=True)
        place = torch.cat([torch.arange(end - num, end) for num, end in pairs])
        counts = torch.tensor(q_lens)
        owner = torch.repeat_interleave(torch.arange(count), counts)
        slots = table[owner, place // _BLOCK_TOKENS].long() * _BLOCK_TOKENS + place % _BLOCK_TOKENS
        self.context = ForwardContext(
            backend=backend or TorchBackend(),
            pool=self.pool,
            q_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).int().to(there),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32).to(there),
            block_table=table.to(there),
            slots=slots.to(there),
            seq_of_token=owner.int().to(there),
            pos_of_token=place.int().to(there),
            q_lens=list(q_lens),
            kv_lens=list(kv_lens),
            state_slots=list(range(count)),
        )
        axes = torch.stack([place, place + 1, place + 2])[:, None]  # of an image's tokens
        self.positions = (axes if loaded.adapter.rope else place[None]).to(there)
        width = int(loaded.text_config.hidden_size)
        self.rows = torch.randn(len(place), width).to(there, dtype) / 16
        self.extra = _deepstack(loaded, self.rows) if loaded.adapter.deepstack else {}

    def embeddings(self, number: int) -> Any:
        """What a layer's rotary embedding makes of the positions."""
        decoder: Any = self._loaded.decoder
        return rotate(decoder, self.rows, self.positions, rotation_of(decoder, number))

    def added_by(self, number: int) -> torch.Tensor:
        """What the modules of a layer add to the rows, (T, E) in double, on the host: a GPU would
        load kernels for numbers that nothing else needs."""
        decoder: Any = self._loaded.decoder
        with self._calling():
            out = decoder.layers[number](
                self.rows[None],
                attention_mask=None,
                position_ids=self.positions,
                past_key_values=None,
                use_cache=False,
                position_embeddings=self.embeddings(number),
            )
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out).reshape(self.rows.shape)
        return found.cpu().double() - self.rows.cpu().double()

    def after_all(self) -> torch.Tensor:
        """The decoder's last hidden state of the rows, with `extra`, (T, E)."""
        decoder: Any = self._loaded.decoder
        with self._calling():
            output = decoder(
                inputs_embeds=self.rows[None],
                position_ids=self.positions,
                use_cache=False,
                **self.extra,
            )
        found: torch.Tensor = output.last_hidden_state[0]
        return found

    def check_same(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raises Unlike where they differ by more than the order of sums."""
        got, wanted = got.cpu().double(), wanted.cpu().double()
        most = float((got - wanted).abs().max())
        if not most <= TOLERANCE[self._loaded.dtype] * float(wanted.abs().max()):
            raise Unlike(f"{what} differs by {most:.2g}")

    def check_whole(self, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Of the decoder's last hidden states. Raises Unlike."""
        got, wanted = got.cpu().double(), wanted.cpu().double()
        apart = float((got - wanted).abs().mean() / wanted.abs().mean())
        if not apart <= _WHOLE_TOLERANCE[self._loaded.dtype]:
            raise Unlike(f"something around its layers differs by {apart:.2g}")

    @contextmanager
    def random_states(self) -> Iterator[list[torch.Tensor]]:
        """The states of the trial's sequences, which calls advance; none without such."""
        if self._states is None:
            yield []
            return
        with self._states.random_pool(len(self.context.q_lens)) as pool:
            yield pool.all_tensors()

    @contextmanager
    def _calling(self) -> Iterator[None]:
        call = PagedCall(self._layers, self.context, self._loaded.adapter)
        with contextlib.ExitStack() as stack:
            stack.enter_context(forward_context(call))
            if self._states is not None:
                stack.enter_context(self._states.in_use(self.context))
            yield
