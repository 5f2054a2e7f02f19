"""Parts of a Llama-like decoder layer, and a trial of what its modules compute.

For those who compute such a layer in another way than transformers (`decode_layers`, `last_layer`):
they look at its modules' names to find the parts, and at a trial's numbers to know that these parts
do what is expected of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foveal_runtime.model.attention import ForwardContext, KVPool, LayerGeometry
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.context import PagedCall, forward_context
from foveal_runtime.model.cpu.fusing import DTYPES, TOLERANCE

_TOP = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_BLOCK_TOKENS = 16
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


def check_decoder(loaded: LoadedModel, layers: Sequence[LayerGeometry]) -> None:
    """Raises Unlike where something other than its layers makes it unfit."""
    decoder: Any = loaded.decoder
    for name, kind in (("layers", nn.ModuleList), ("norm", nn.Module), ("rotary_emb", nn.Module)):
        if not isinstance(getattr(decoder, name, None), kind):
            raise Unlike(f"its decoder has no {name}")
    if loaded.adapter.correct_query is not None or loaded.adapter.deepstack:
        raise Unlike("its family does more between the layers")
    if loaded.dtype not in DTYPES:
        raise Unlike(f"its dtype is {loaded.dtype}")
    if len(decoder.layers) != len(layers) or any(layer.has_sinks for layer in layers):
        raise Unlike("its attention is another")


def llama_parts(layer: Any) -> dict[str, Any]:
    """The layer's modules by name, those of its attention among them. Raises Unlike."""
    top = children_of(layer, _TOP)
    return top | children_of(top["self_attn"], _ATTENTION, _HEAD_NORMS)


def children_of(
    module: nn.Module, wanted: set[str], more: set[str] | frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The children that have parameters: all `wanted`, perhaps some of `more`, no others.

    Raises Unlike.
    """
    found = {name: child for name, child in module.named_children() if list(child.parameters())}
    if not wanted <= set(found) <= wanted | more:
        odd = ", ".join(sorted(set(found) ^ wanted))
        raise Unlike(f"{type(module).__name__} is made of other parts ({odd})")
    return found


class Trial:
    """Random rows of some sequences, in a small KV pool of random contexts.

    Attributes:
        rows: (T, E). Small, so that what a layer adds is larger than what it is added to; its norms
            take the size away.
        embeddings: what the decoder's rotary embedding makes of `positions`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[LayerGeometry],
        *,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
    ) -> None:
        self._loaded = loaded
        self._layers = layers
        decoder: Any = loaded.decoder
        count, dtype = len(kv_lens), loaded.dtype
        num_blocks = -(-max(kv_lens) // _BLOCK_TOKENS)
        self.pool = KVPool(
            layers, num_blocks * count + 1, _BLOCK_TOKENS, dtype, torch.device("cpu")
        )
        for one in (*self.pool.keys, *self.pool.values):
            one.normal_()
        table = torch.arange(1, num_blocks * count + 1, dtype=torch.int32).view(count, num_blocks)
        pairs = zip(q_lens, kv_lens, strict=True)
        place = torch.cat([torch.arange(end - num, end) for num, end in pairs])
        counts = torch.tensor(q_lens)
        owner = torch.repeat_interleave(torch.arange(count), counts)
        slots = table[owner, place // _BLOCK_TOKENS].long() * _BLOCK_TOKENS + place % _BLOCK_TOKENS
        self.context = ForwardContext(
            backend=TorchBackend(),
            pool=self.pool,
            q_start=torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32),
            block_table=table,
            slots=slots,
            seq_of_token=owner.int(),
            pos_of_token=place.int(),
            q_lens=list(q_lens),
            kv_lens=list(kv_lens),
        )
        self.positions = place.expand(3, 1, -1) if loaded.adapter.rope else place[None]
        width = int(loaded.text_config.hidden_size)
        self.rows = torch.randn(len(place), width).to(dtype) / 16
        self.embeddings = decoder.rotary_emb(self.rows[None], self.positions)

    def added_by(self, number: int) -> torch.Tensor:
        """What the modules of a layer add to the rows, (T, E) in double."""
        decoder: Any = self._loaded.decoder
        with forward_context(self._call()):
            out = decoder.layers[number](
                self.rows[None],
                attention_mask=None,
                position_ids=self.positions,
                past_key_values=None,
                use_cache=False,
                position_embeddings=self.embeddings,
            )
        found: torch.Tensor = (out[0] if isinstance(out, tuple) else out).reshape(self.rows.shape)
        return found.double() - self.rows.double()

    def after_all(self) -> torch.Tensor:
        """The decoder's last hidden state of the rows, (T, E)."""
        decoder: Any = self._loaded.decoder
        with forward_context(self._call()):
            output = decoder(
                inputs_embeds=self.rows[None], position_ids=self.positions, use_cache=False
            )
        found: torch.Tensor = output.last_hidden_state[0]
        return found

    def check_same(self, what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        """Raises Unlike where they differ by more than the order of sums."""
        most = float((got.double() - wanted.double()).abs().max())
        if not most <= TOLERANCE[self._loaded.dtype] * float(wanted.double().abs().max()):
            raise Unlike(f"{what} differs by {most:.2g}")

    def _call(self) -> PagedCall:
        return PagedCall(self._layers, self.context, self._loaded.adapter)
