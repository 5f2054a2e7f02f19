"""Removal of layers of a vision tower whose output is not read.

Called by the loader. LLaVA and its kin take the features of an earlier layer of the tower
(`vision_feature_layer`, mostly the last but one); transformers computes the later ones, too.
Such a layer keeps its place and hands its input on, and its weights are given back.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

_log = logging.getLogger(__name__)
_CALL_ERRORS = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def drop_unused_layers(model: Any, config: Any) -> int:
    """Empties the tower's layers after the last that is read; returns how many.

    0 where the family reads the last one, or where a trial gives other features than before.
    """
    wanted = getattr(config, "vision_feature_layer", None)
    vision = getattr(config, "vision_config", None)
    tower = getattr(model.base_model, "vision_tower", None)
    layers = None if tower is None else _layers(tower, getattr(vision, "num_hidden_layers", None))
    if layers is None or wanted is None:
        return 0
    count = len(layers)
    # Feature 0 is what goes into the first layer, feature n what comes out of the n-th.
    read = [i % (count + 1) for i in ([wanted] if isinstance(wanted, int) else wanted)]
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
