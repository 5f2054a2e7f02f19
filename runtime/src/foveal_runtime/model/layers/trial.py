"""A trial of what a decoder's layers compute: random rows, by its modules and in another way.

For those who compute layers in another way than transformers (`decoder_layers`, `last_layer`,
`gpu_layer`): the numbers show that a layer's parts (`layer_parts`) do what is expected of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from foveal_runtime.model.attention import (
    AttentionBackend,
    ForwardContext,
    KVPool,
    LayerGeometry,
)
from foveal_runtime.model.attention.torch_backend import TorchBackend
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.context import PagedCall, forward_context
from foveal_runtime.model.cpu.fusing import TOLERANCE
from foveal_runtime.model.layers.layer_parts import (
    Unlike,
    deepstack_arguments,
    deepstack_levels,
    rotate,
    rotation_of,
)
from foveal_runtime.model.layers.state import States

_BLOCK_TOKENS = 16
_WHOLE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference over mean size after all layers: shows what is done around the layers (a scaled
embedding), not last bits, which the trials of single layers show."""


_CHOICE_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.3}
"""Likewise, where last bits may send a row to other experts."""
_CLEAR = {torch.float32: 1e-4, torch.bfloat16: 2**-5}
"""How far apart a router's products of the last expert used and of the next one are, over their
spread, where last bits change nothing."""


def _deepstack(loaded: LoadedModel, rows: torch.Tensor) -> dict[str, Any]:
    """As if every other row were of an image."""
    mask = torch.arange(len(rows), device=rows.device) % 2 == 0
    levels = [torch.randn_like(rows[mask]) / 16 for _ in range(deepstack_levels(loaded))]
    return deepstack_arguments(loaded, mask, levels)


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
        has_item: bool = False,
    ) -> None:
        """`backend`: what both ways attend by; None: the reference. `has_item`: all rows but the
        first and the last are of one item, where a family's see each other."""
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
            groups=self._groups(len(place), there) if has_item else None,
            state_slots=list(range(count)),
        )
        # Close to the model's last position: what depends on it shows there, if anywhere.
        longest = int(loaded.text_config.max_position_embeddings) - loaded.adapter.position_offset
        far = place + max(0, longest - max(kv_lens) - 2)
        axes = [far + axis for axis in range(loaded.rope_axes)]  # of an image's tokens
        self.positions = (torch.stack(axes)[:, None] if axes else far[None]).to(there)
        width = int(loaded.text_config.hidden_size)
        self.rows = torch.randn(len(place), width).to(there, dtype) / 16
        self.extra = _deepstack(loaded, self.rows) if loaded.adapter.deepstack else {}

    def _groups(self, count: int, there: torch.device) -> torch.Tensor | None:
        if self._loaded.adapter.bidirectional == "none":
            return None
        groups = torch.zeros(count, dtype=torch.int32)
        groups[0] = groups[-1] = -1
        return groups.to(there)

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

    @contextmanager
    def clear_choices(self, router: nn.Module | None) -> Iterator[torch.Tensor]:
        """Which rows (T) of a layer that is called within go to experts that no last bits decide
        about: all without a router. Raises Unlike where there is none."""
        clear = torch.ones(len(self.rows), dtype=torch.bool)

        def look(
            router: Any, given: tuple[torch.Tensor, ...], out: tuple[torch.Tensor, ...]
        ) -> None:
            scores = functional.linear(given[0].flatten(0, -2), router.weight).float()
            ranked = scores.sort(descending=True).values
            num_used = out[-1].shape[-1]
            if num_used < ranked.shape[1]:
                apart = ranked[:, num_used - 1] - ranked[:, num_used]
                clear.copy_(apart > _CLEAR[self._loaded.dtype] * scores.std(1))

        if router is None:
            yield clear
            return
        with router.register_forward_hook(look):
            yield clear
        if not clear.any():
            raise Unlike("its router sees hardly a difference between experts")

    def check_whole(
        self, got: torch.Tensor, wanted: torch.Tensor, *, has_choices: bool = False
    ) -> None:
        """Of the decoder's last hidden states. Raises Unlike."""
        tolerance = (_CHOICE_TOLERANCE if has_choices else _WHOLE_TOLERANCE)[self._loaded.dtype]
        got, wanted = got.cpu().double(), wanted.cpu().double()
        apart = float((got - wanted).abs().mean() / wanted.abs().mean())
        if not apart <= tolerance:
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
