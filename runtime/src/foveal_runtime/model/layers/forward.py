"""The decoder's forward, by whichever way fits a step: its modules, or what is faster.

Made by the runner; ways on CPUs are found once the KV pool is there. Knows nothing of requests:
rows, positions and a ForwardContext come in, hidden states go out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from foveal_runtime.model.attention import (
    AttentionBackend,
    ForwardContext,
    KVPool,
    LayerGeometry,
)
from foveal_runtime.model.attention.cpu import CpuBackend
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.context import PagedCall, forward_context
from foveal_runtime.model.layers.decoder_layers import DecoderLayers, make_decoder_layers
from foveal_runtime.model.layers.last_layer import WantedRows, only_rows, shorten_last_layer
from foveal_runtime.model.layers.lora import LoraRows, lora_rows
from foveal_runtime.model.layers.state import States


class Forward:
    """One decoder and its ways.

    Attributes:
        layers: what attention is computed by, where modules call it.
        decoder_layers: computes a step in one call, where it can.
        has_short_last_layer: whether rows that nobody wants may be left out of the last layer.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layers: Sequence[LayerGeometry],
        states: States,
        backend: AttentionBackend,
    ) -> None:
        self._loaded = loaded
        self._states = states
        self.layers = layers
        self.decoder_layers: DecoderLayers | None = None
        self.has_short_last_layer = False
        if next(loaded.decoder.parameters()).device.type == "cuda":
            self.use_gpu_layers(backend)

    def use_gpu_layers(self, backend: AttentionBackend) -> int:
        """Before the KV pool is there, because weights move; returns how many layers there are."""
        from foveal_runtime.model.layers.gpu_layer import (
            replace_layers,
        )  # torch for CPUs: no Triton

        made = replace_layers(self._loaded, self.layers, backend)
        self.has_short_last_layer = any(one.is_short for one in made)
        return len(made)

    def find_ways(self, pool: KVPool, backend: object, device: torch.device) -> None:
        """Tries what is faster than modules; to be called once."""
        if device.type != "cpu":
            return
        if not self._states.shapes:
            self.has_short_last_layer = shorten_last_layer(self._loaded, self.layers)
        if isinstance(backend, CpuBackend):
            self.decoder_layers = make_decoder_layers(self._loaded, self.layers, pool, self._states)

    def __call__(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        extra: Mapping[str, Any],
        wanted: WantedRows | None = None,
        loras: Sequence[LoraRows] = (),
    ) -> torch.Tensor:
        """embeds (T, E) to hidden states after the last norm: (n, E) of those wanted, or (T, E).

        Writes keys and values of all rows. `extra`: more arguments of the decoder's modules;
        `loras`: rows that an adapter is for.
        """
        is_short = self.has_short_last_layer and context.groups is None and not loras
        few = wanted if is_short else None
        whole = self.decoder_layers if not loras else None
        if whole is not None and whole.takes(positions, context, extra):
            hidden = whole.run(embeds, positions, context, extra, few)
            return hidden if wanted is None or few is not None else hidden[wanted.index]
        with (
            forward_context(PagedCall(self.layers, context, self._loaded.adapter)),
            self._states.in_use(context),
            only_rows(few, None if loras else context),
            lora_rows(loras, len(embeds)),
        ):
            output = self._loaded.decoder(
                inputs_embeds=embeds[None], position_ids=positions, use_cache=False, **extra
            )
        hidden = output.last_hidden_state[0]
        return hidden if wanted is None or few is not None else hidden[wanted.index]
