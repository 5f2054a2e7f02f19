"""Finds what computes the recurrences of a decoder's layers faster than their modules.

Called by `state`. On CPUs a C kernel takes whole steps; on GPUs Triton kernels take those with one
token of each sequence. Either is tried with each module's own weights and must say what the module
says; all modules of a kind get it, or none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from foveal_runtime.model.checkpoint.probe import StateShape
from foveal_runtime.model.cpu.fusing import TOLERANCE
from foveal_runtime.model.cpu.kernels import RecurrentKernels, load_recurrent_kernels
from foveal_runtime.model.layers.delta_rule import DeltaRule, Parts
from foveal_runtime.model.layers.layer_parts import Unlike, trying
from foveal_runtime.model.layers.mamba import MambaRule, is_mixer

Rule = DeltaRule | MambaRule
"""A module's forward with the C kernel of its recurrence."""
OneToken = Callable[[torch.Tensor, Parts, torch.Tensor], torch.Tensor]
"""rows (1, n, E), a layer's states, and slots (n) on the device, to rows (1, n, E)."""
Modules = Sequence[tuple[Any, StateShape]]
"""Each with a forward that `state` has put there."""
_TRIED = 5
"""Tokens of a trial's chunk, beside a sequence of one token."""
_log = logging.getLogger(__name__)


class Plain(Protocol):
    """A module's own forward over a step."""

    def split(self, rows: torch.Tensor, parts: Parts, segments: torch.Tensor) -> torch.Tensor: ...


def use_rules(modules: Modules) -> None:
    """On CPUs."""
    kinds: tuple[type[Rule], ...] = (DeltaRule, MambaRule)
    for kind, chosen in zip(kinds, _by_kind(modules)[:2], strict=True):
        if chosen:
            _use_kernel(kind, chosen)


def use_steps(modules: Modules) -> bool:
    """On GPUs; whether all have them."""
    from foveal_runtime.model.layers import gpu_recurrence  # torch for CPUs: no Triton

    kinds = (gpu_recurrence.DeltaStep, gpu_recurrence.MambaStep, gpu_recurrence.ConvStep)
    done = [_use_steps(*one) for one in zip(kinds, _by_kind(modules), strict=True)]
    return 0 < sum(done) == len(modules)


def _by_kind(modules: Modules) -> tuple[Modules, Modules, Modules]:
    """Delta nets, Mamba-2 mixers, and short convolutions alone."""
    found: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for module, shape in modules:
        has_matrix = "recurrent" in shape.parts
        found[2 if not has_matrix else is_mixer(module)].append((module, shape))
    return found


def make_rule(
    kind: type[Rule], module: Any, kernels: RecurrentKernels, plain: Plain, states: Parts
) -> Rule:
    """The kernel's way of computing `module`, as `plain` does. `states`: some of two slots, with
    whatever in them. Raises Unlike where the kernel computes another thing."""
    with trying():
        made = kind(module, kernels)
        segments = torch.tensor([[0, 1, 1], [1, _TRIED, 0]])
        _compare(made, segments, plain, segments, states, module)
    return made


def make_step(kind: Any, module: Any, plain: Plain, states: Parts) -> OneToken:
    """The same of kernels for one token of each sequence."""
    with trying():
        made: OneToken = kind(module)
        slots = torch.tensor([1, 0], device=states["conv"].device)
        _compare(made, slots, plain, torch.tensor([[0, 1, 1], [1, 1, 0]]), states, module)
    return made


def _compare(
    made: Any, places: torch.Tensor, plain: Plain, segments: torch.Tensor, states: Parts,
    module: Any,
) -> None:  # fmt: skip
    count = int(segments[:, 1].sum())
    like = states["conv"]
    rows = torch.randn(1, count, module.out_proj.out_features, device=like.device).to(like.dtype)
    before = {name: torch.randn_like(one) / 4 for name, one in states.items()}
    wanted, got = ({k: v.clone() for k, v in before.items()} for _ in range(2))
    wanted["out"] = plain.split(rows, wanted, segments)
    got["out"] = made(rows, got, places)
    for name, one in wanted.items():
        apart = float((got[name].double() - one.double()).abs().max())
        if not apart <= TOLERANCE[like.dtype] * float(one.double().abs().max()):
            raise Unlike(f"{name} differs by {apart:.2g}")


def _use_kernel(kind: type[Rule], modules: Sequence[tuple[Any, StateShape]]) -> None:
    """Lets the C kernel compute the recurrence of all these, or of none; logs why not."""
    kernels = load_recurrent_kernels()
    if isinstance(kernels, str):
        _log.info("%s is computed by modules: %s", kind.NAME, kernels)
        return
    rules = []
    for module, shape in modules:
        try:
            states = _some_states(shape, torch.device("cpu"))
            rules.append(make_rule(kind, module, kernels, module.forward.plain, states))
        except Unlike as reason:
            _log.info("%s is computed by modules: %s", kind.NAME, reason)
            return
    for (module, _), rule in zip(modules, rules, strict=True):
        module.forward.rule = rule
    _log.info("%s of %d layers is computed by the kernel", kind.NAME, len(rules))


def _use_steps(kind: Any, modules: Sequence[tuple[Any, StateShape]]) -> int:
    """Gives all these the GPU's kernels, or none; logs why not. Returns how many have them."""
    steps = []
    for module, shape in modules:
        try:
            states = _some_states(shape, next(module.parameters()).device)
            steps.append(make_step(kind, module, module.forward.plain, states))
        except Unlike as reason:
            _log.warning("%s is computed by modules: %s", kind.NAME, reason)
            return 0
    for (module, _), step in zip(modules, steps, strict=True):
        module.forward.step = step
    return len(steps)


def _some_states(shape: StateShape, device: torch.device) -> Parts:
    return {
        name: torch.empty(2, *size, dtype=dtype, device=device)
        for name, (size, dtype) in shape.parts.items()
    }
