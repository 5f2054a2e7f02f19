"""Logits through the model's own head, whatever that head does.

`lm_head` alone is not enough: families scale or cap logits after it. So the outer model runs as
it is, on a shallow copy whose core is replaced by a stub that returns hidden states already
computed. Used by the runner and the profiler.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


class _CoreOutput:
    """The core's output as outer models read it: hidden states, and None for all else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _CoreStub(nn.Module):  # type: ignore[misc]
    """Hands on what it is given, and has what else an outer model asks its core for."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.__dict__["_core"] = core  # not a module of the stub's own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_core"], name)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _CoreOutput:
        return _CoreOutput(inputs_embeds)


class Head:
    """Calls the outer model's forward around a stubbed core.

    Attributes:
        is_missing: the model is an encoder, which makes no logits.
    """

    def __init__(self, model: nn.Module, core_name: str) -> None:
        self.is_missing = not core_name
        if self.is_missing:
            return
        assert core_name in model._modules
        shell = copy.copy(model)
        shell._modules = dict(model._modules)
        shell._modules[core_name] = _CoreStub(model._modules[core_name])
        self._shell = shell

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (n, E) to logits (n, V); (n, 0) where there is no head."""
        if self.is_missing:
            return hidden[:, :0]
        output = self._shell(inputs_embeds=hidden[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits
