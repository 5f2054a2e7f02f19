"""Inputs of the decoder made of a batch's tokens: embeddings, encoder outputs in their places, and
arguments of layers further in.

Called by the runner with a batch's windows. Whether all outputs are there was checked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.layers.layer_parts import deepstack_arguments
from foveal_runtime.model.runner.batch import TokenWindow
from foveal_runtime.model.runner.encoder import EncoderStore

Arguments = dict[str, Any]
"""Of the decoder's modules, beside embeddings and positions."""


class TokenEmbedding:
    """Input embeddings of a batch."""

    def __init__(self, loaded: LoadedModel, store: EncoderStore) -> None:
        self._loaded = loaded
        self._store = store

    def embed(self, ids: torch.Tensor, windows: Sequence[TokenWindow]) -> torch.Tensor:
        """Token embeddings (T, E) with encoder outputs in place."""
        embeds = self._loaded.embed_tokens(ids)
        for window in windows:
            for one, row, first, count in window.embed_spans():
                output = self._store.lookup(one.mm_hash)
                assert output is not None
                embeds[row : row + count] = output[0, first : first + count]
        return embeds

    def deepstack(self, windows: Sequence[TokenWindow], num_tokens: int) -> np.ndarray:
        """Which tokens take further levels of their encoder outputs, bool (T); empty for models
        whose encoders have one level."""
        if not self._loaded.adapter.deepstack:
            return np.zeros(0, np.bool_)
        mask = np.zeros(num_tokens, np.bool_)
        for window in windows:
            for _, row, _, count in window.embed_spans():
                mask[row : row + count] = True
        return mask

    def arguments(
        self, ids: torch.Tensor, windows: Sequence[TokenWindow], deepstack: torch.Tensor
    ) -> Arguments:
        """What early or all layers take. ids (T), `deepstack` as above, on the device."""
        found: Arguments = {**self._loaded.layer_inputs(ids)}
        levels = []
        if self._loaded.adapter.deepstack:
            for window in windows:
                for one, _, first, count in window.embed_spans():
                    output = self._store.lookup(one.mm_hash)
                    assert output is not None
                    levels.append(output[1:, first : first + count])
        if levels:
            joined = torch.cat(levels, dim=1).unbind(0)
            found |= deepstack_arguments(self._loaded, deepstack, joined)
        return found
