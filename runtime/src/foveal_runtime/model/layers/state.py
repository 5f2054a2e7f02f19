"""Recurrent state of hybrid decoders: one slot per running request, beside paged attention.

Layers with linear attention or short convolutions keep a state per sequence instead of keys and
values. transformers' modules read and write it through a cache object and take no packed batches:
several sequences in one flat row would leak into each other without an error. So each such
module's forward is replaced by one that cuts the flat batch into its sequences and hands the module
their slots. The runner opens a slot when a request arrives and closes it when the request is gone.
Further slots hold snapshots, which the scheduler names: copied where a chunk ended, and back when
another request, or a preempted one, goes on from there.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from foveal_runtime.engine.types.step import ScheduledRequest
from foveal_runtime.model.attention import ForwardContext
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.checkpoint.probe import StateShape
from foveal_runtime.model.layers import mamba
from foveal_runtime.model.layers.delta_rule import Parts
from foveal_runtime.model.layers.recurrence import OneToken, Rule, use_rules, use_steps
from foveal_runtime.plan.errors import StartupError

_CACHE_KEYWORDS = ("cache_params", "past_key_values")
_log = logging.getLogger(__name__)


class StatePool:
    """State tensors by layer, (slots, *shape), and which request owns which slot.

    Attributes:
        tensors: layer → {"conv" or "recurrent": tensor}; requests' slots, then snapshots.
        ends: slot → number of tokens that its state has seen.
    """

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_slots: int,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        whole = num_slots + num_snapshots
        self.tensors = {
            shape.layer: {
                name: torch.zeros(whole, *size, dtype=dtype, device=device)
                for name, (size, dtype) in shape.parts.items()
            }
            for shape in shapes
        }
        self.ends = [0] * whole
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[str, int] = {}

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.all_tensors())

    def all_tensors(self) -> list[torch.Tensor]:
        return [tensor for parts in self.tensors.values() for tensor in parts.values()]

    def touch(self) -> None:
        """Takes all memory now: zeros are not there before they are written."""
        for tensor in self.all_tensors():
            tensor.fill_(0)

    def open(self, request_id: str, snapshot: int = 0) -> None:
        """The state of `snapshot`, 1 ... num_snapshots, or an empty one for the request, in the
        slot that it has already or in a free one."""
        if request_id not in self._slots:
            assert self._free, "more requests in the runner than were planned"
            self._slots[request_id] = self._free.pop()
        slot = self._slots[request_id]
        if snapshot:
            self._copy(self.num_slots + snapshot - 1, slot)
            return
        self.ends[slot] = 0
        for tensor in self.all_tensors():
            tensor[slot].zero_()

    def save(self, request_id: str, snapshot: int) -> None:
        """Keeps the request's state as it is now."""
        self._copy(self._slots[request_id], self.num_slots + snapshot - 1)

    def _copy(self, source: int, target: int) -> None:
        self.ends[target] = self.ends[source]
        for tensor in self.all_tensors():
            tensor[target].copy_(tensor[source])

    def close(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)

    def advance(self, request_id: str, low: int, high: int) -> int:
        """The slot of a request whose positions [low, high) are computed next. Advancing a state
        twice over the same tokens would be wrong without an error, so it is checked here."""
        slot = self._slots[request_id]
        assert self.ends[slot] == low, (request_id, self.ends[slot], low)
        self.ends[slot] = high
        return slot

    def check_integrity(self, request_ids: Sequence[str]) -> None:
        assert self._slots.keys() == set(request_ids)
        assert sorted([*self._slots.values(), *self._free]) == list(range(self.num_slots))


class _Slots:
    """What a module sees as its cache in one call of equally long sequences.

    Every tensor that is handed out is written back afterwards: steps of one token change it in
    place, and some modules then call no update.
    """

    def __init__(self, parts: Parts, slots: torch.Tensor) -> None:
        self._parts = parts
        self._slots = slots
        self._now: dict[str, torch.Tensor] = {}

    def _read(self, name: str) -> torch.Tensor | None:
        if name not in self._parts:
            return None
        if name not in self._now:
            self._now[name] = self._parts[name][self._slots]
        return self._now[name]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        assert state_idx == 0
        return self._read("conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        assert state_idx == 0
        return self._read("recurrent")

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """`new` (n, C, T) behind the state (n, C, K); returns both, keeps the last K."""
        old = self._read("conv")
        assert old is not None
        whole = torch.cat([old, new], dim=-1)
        self._now["conv"] = whole[..., -old.shape[-1] :]
        return whole

    def update_recurrent_state(
        self, state: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._now["recurrent"] = state
        return state

    def write_back(self) -> None:
        for name, tensor in self._now.items():
            self._parts[name][self._slots] = tensor.to(self._parts[name].dtype)


class StateForward:
    """A module's own forward over sequences that are cut out of a flat batch.

    Attributes:
        limits: rows of one sequence, and sequences of one row each, that one call computes.
    """

    def __init__(self, module: Any, keyword: str) -> None:
        self.forward = module.forward
        self.limits = (sys.maxsize, sys.maxsize)
        self._keyword = keyword

    def split(
        self, rows: torch.Tensor, parts: Parts, segments: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """rows (1, T, E), all of them some segment's (see `States`), whose states go on."""
        flat = rows[0]
        out = torch.empty_like(flat)
        listed = segments.tolist()
        max_rows, max_sequences = self.limits
        singles = [(base, slot) for base, count, slot in listed if count == 1]
        for first in range(0, len(singles), max_sequences):
            bases, slots = zip(*singles[first : first + max_sequences], strict=True)
            chosen = torch.tensor(bases, device=flat.device)
            out[chosen] = self.compute(flat[chosen][:, None], parts, slots, **kwargs)[:, 0]
        for base, count, slot in listed:
            for low in range(base, base + count if count > 1 else base, max_rows):
                high = min(low + max_rows, base + count)
                out[low:high] = self.compute(flat[None, low:high], parts, [slot], **kwargs)[0]
        return out[None]

    def compute(
        self, rows: torch.Tensor, parts: Parts, slots: Sequence[int], **kwargs: Any
    ) -> torch.Tensor:
        """rows (n, T, E): n sequences of T tokens each, whose states are in `slots` of `parts`."""
        cache = _Slots(parts, torch.tensor(slots, device=rows.device))
        out: torch.Tensor = self.forward(rows, **{**kwargs, self._keyword: cache})
        cache.write_back()
        return out


class _Replaced:
    """Stands in for the forward of one module with state.

    Attributes:
        plain: the module's own forward.
        rule: its forward with the C kernel, once there is one.
        step: the same of one token of each sequence with a GPU's kernels.
    """

    def __init__(self, module: Any, keyword: str, states: States) -> None:
        self._layer = int(module.layer_idx)
        self._states = states
        self.plain = StateForward(module, keyword)
        self.rule: Rule | None = None
        self.step: OneToken | None = None

    def __call__(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        segments = self._states.segments
        if segments is None:  # the probe, before there are slots
            out: torch.Tensor = self.plain.forward(hidden_states, **kwargs)
            return out
        assert self._states.pool is not None
        parts = self._states.pool.tensors[self._layer]
        if self.step is not None and self._states.slots is not None:
            return self.step(hidden_states, parts, self._states.slots)
        if self.rule is not None:
            return self.rule(hidden_states, parts, segments)
        kwargs.pop("attention_mask", None)
        return self.plain.split(hidden_states, parts, segments, **kwargs)


class States:
    """The states of one decoder; empty for decoders without.

    Attributes:
        shapes: what one sequence takes, layer by layer.
        segments: those of the current call (see `segments_of`). On the host.
        slots: (n) of the current call on the device, where it has one token of each sequence and
            kernels for that; below 0 is nobody's.
        has_steps: whether all layers have such kernels.
    """

    def __init__(self, loaded: LoadedModel, shapes: Sequence[StateShape]) -> None:
        self.shapes = tuple(shapes)
        self.pool: StatePool | None = None
        self.segments: torch.Tensor | None = None
        self.slots: torch.Tensor | None = None
        self.has_steps = False
        found = _modules_with_state(loaded.decoder, shapes)
        for module, keyword in found.values():
            module.forward = _Replaced(module, keyword, self)
        mixers = set(mamba.mixers_of(loaded.decoder)) if shapes else set()
        for mixer in mixers:
            mamba.settle(mixer)
            mixer.forward.plain.limits = (mamba.ROWS, mamba.num_sequences(mixer))
        self._modules = [(found[shape.layer][0], shape) for shape in shapes]
        if next(loaded.decoder.parameters()).device.type == "cuda":
            self.use_gpu_kernels()
        else:
            use_rules(self._modules)

    def use_gpu_kernels(self) -> None:
        """For steps with one token of each sequence."""
        self.has_steps = use_steps(self._modules)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one sequence's state, all layers."""
        return sum(shape.size_bytes for shape in self.shapes)

    def allocate(
        self,
        num_slots: int,
        device: torch.device,
        *,
        num_snapshots: int = 0,
        is_touched: bool = True,
    ) -> None:
        if self.shapes:
            self.pool = StatePool(self.shapes, num_slots, device, num_snapshots)
            if is_touched:
                self.pool.touch()

    def advance(self, planned: Iterable[ScheduledRequest]) -> list[int] | None:
        """The slots of requests whose next tokens are computed; None without states."""
        pool = self.pool
        if pool is None:
            return None
        return [
            pool.advance(
                entry.request_id,
                entry.num_computed_tokens,
                entry.num_computed_tokens + entry.num_scheduled_tokens,
            )
            for entry in planned
        ]

    def save(self, computed: Iterable[ScheduledRequest]) -> None:
        """Takes the snapshots that a step asks for, once it is computed."""
        for entry in computed:
            if entry.snapshot and self.pool is not None:
                self.pool.save(entry.request_id, entry.snapshot)

    @contextmanager
    def in_use(self, context: ForwardContext) -> Iterator[None]:
        """Makes the context's sequences those of the modules with state."""
        if self.pool is None:
            yield
            return
        assert context.state_slots is not None or context.state_slots_there is not None
        self.segments = segments_of(context)
        self.slots = context.state_slots_there
        if self.slots is None and self.has_steps and max(context.q_lens, default=0) == 1:
            device = context.slots.device
            self.slots = torch.tensor(context.state_slots, dtype=torch.int64, device=device)
        try:
            yield
        finally:
            self.segments = self.slots = None

    @contextmanager
    def random_pool(self, num_slots: int) -> Iterator[StatePool]:
        """States for a trial instead of those of requests."""
        kept = self.pool
        self.pool = StatePool(self.shapes, num_slots, torch.device("cpu"))
        for one in self.pool.all_tensors():
            one.normal_()
        try:
            yield self.pool
        finally:
            self.pool = kept


def segments_of(context: ForwardContext) -> torch.Tensor:
    """(n, 3) of int64, of each sequence: first row, number of rows, slot; none without states."""
    base, segments = 0, []
    for count, slot in zip(context.q_lens, context.state_slots or (), strict=False):
        segments.append((base, count, slot))
        base += count
    return torch.tensor(segments, dtype=torch.int64).reshape(-1, 3)


def _modules_with_state(
    decoder: nn.Module, shapes: Sequence[StateShape]
) -> dict[int, tuple[Any, str]]:
    """Layer → its innermost module that takes a cache, and the cache's keyword."""
    found: dict[int, tuple[Any, str]] = {}
    wanted = {shape.layer for shape in shapes}
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if layer not in wanted:
            continue
        names = inspect.signature(module.forward).parameters
        keyword = next((name for name in _CACHE_KEYWORDS if name in names), None)
        is_beside = found.get(layer, ("", ""))[1] == "cache_params" != keyword  # attention
        if keyword is not None and not is_beside:
            found[layer] = (module, keyword)  # modules() goes from the outside in
    missing = sorted(wanted - found.keys())
    if missing:
        raise StartupError(f"no module of layer {missing[0]} takes a state: not supported")
    return found
