"""What each stage costs, as measured: fitted once, kept as JSON, read by the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from foveal_runtime.engine.testing.fake_runner import FakeLoras
from foveal_runtime.engine.types.step import (
    DoneStep,
    GrammarStats,
    ModelTraits,
    Sampled,
    StepPlan,
    StepResult,
)
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineConfig
from foveal_runtime.wire.item import pack_item

FEATURES = (
    "step", "prompt", "prompt_token", "prompt_context", "stream", "stream_context", "embed",
)  # fmt: skip
"""A step; a part of a prompt in it, a token of that, and the tokens before it that it sees; a
stream that goes on by a token, and its tokens so far; an embedding to encode."""
ROLES = ("frontend", "worker", "engine", "client")
NUM_FITS = 3
Table = NDArray[np.float64]


def features(plan: StepPlan) -> list[float]:
    """How often each of FEATURES is in a plan."""
    prompts = tokens = context = streams = seen = 0.0
    for one in plan.scheduled:
        count, start = one.num_scheduled_tokens, one.num_computed_tokens
        if count > 1:
            prompts += 1
            tokens += count
            context += count * (start + count / 2)
        else:
            streams += 1
            seen += start
    embeds = float(sum(entry.num_embeds for entry in plan.encode))
    return [1.0, prompts, tokens, context, streams, seen, embeds]


class Role(msgspec.Struct, frozen=True):
    """CPU seconds of a process beside what the model computes: of a request, of an output token, of
    an image in it, of an image that was not seen before, of a message between an engine and a
    frontend, of a step. One message has the tokens of all streams that the two share, so four
    streams at one frontend cost less than one at each of four."""

    request: float = 0.0
    token: float = 0.0
    item: float = 0.0
    new_item: float = 0.0
    message: float = 0.0
    step: float = 0.0


class Charges:
    """What the processes of a role are charged for, by cost of `Role`."""

    def __init__(self, role: Role) -> None:
        self._costs = dict(zip(Role.__struct_fields__, msgspec.structs.astuple(role), strict=True))
        self.counts = dict.fromkeys(self._costs, 0)

    def add(self, **counts: int) -> float:
        """The CPU seconds of these."""
        for name, count in counts.items():
            self.counts[name] += count
        return sum(self._costs[name] * count for name, count in counts.items())

    @property
    def seconds(self) -> float:
        return sum(self._costs[name] * count for name, count in self.counts.items())


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds while all cores are busy; `alone_speed`: times faster while the others rest."""

    step: dict[str, float]
    frontend: Role = Role()
    worker: Role = Role()
    engine: Role = Role()
    client: Role = Role()
    alone_speed: float = 1.0
    network_seconds: float = 0.0001
    network_bytes_per_second: float = 1e9
    machine: dict[str, str] = {}
    date: str = ""
    fit_error: float = 0.0

    def at_pace(self, pace: float) -> Costs:
        """On a machine that takes `pace` times as long for everything."""

        def slower(role: Role) -> Role:
            return Role(*(pace * value for value in msgspec.structs.astuple(role)))

        return msgspec.structs.replace(
            self, step={name: pace * value for name, value in self.step.items()},
            frontend=slower(self.frontend), worker=slower(self.worker),
            engine=slower(self.engine), client=slower(self.client),
        )  # fmt: skip

    def step_seconds(self, plan: StepPlan) -> float:
        found = zip(FEATURES, features(plan), strict=True)
        return sum(self.step.get(name, 0.0) * count for name, count in found)


class CostRunner:
    """Obeys plans in the time that they cost; says what `reply_of(request, index)` says.

    Args:
        spend: told the CPU seconds of a part of a step.

    Attributes:
        slowness: seconds that a CPU second takes while others want the cores. Results say seconds,
            as a real runner's do: the scheduler paces its steps by them.
    """

    grammars = GrammarStats()

    def __init__(
        self, traits: ModelTraits, costs: Costs, reply_of: Callable[[str, int], int],
        spend: Callable[[float], None] = lambda seconds: None,
    ) -> None:  # fmt: skip
        self.traits, self.loras = traits, FakeLoras()
        self._costs, self._reply_of, self._spend = costs, reply_of, spend
        self.slowness = 1.0
        self._prompts: dict[str, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.finished:
            self._prompts.pop(request_id, None)
        for new in plan.new:
            self._prompts[new.request_id] = new.num_prompt_tokens
        result = StepResult(plan.step)
        for one in plan.scheduled:
            if one.sample:
                stop = one.num_computed_tokens + one.num_scheduled_tokens
                said = stop - self._prompts[one.request_id]
                token = self._reply_of(one.request_id, said)
                result.sampled.append(Sampled(one.request_id, token, -1.0, 1))
        embeds = sum(entry.num_embeds for entry in plan.encode)
        encode = self._costs.step.get("embed", 0.0) * embeds
        result.encode_seconds = encode * self.slowness
        result.forward_seconds = (self._costs.step_seconds(plan) - encode) * self.slowness
        return result

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> DoneStep:
        result = self.execute(plan)
        left = result.encode_seconds
        while between is not None and plan.slice_seconds and left > 0:
            part = min(left, plan.slice_seconds)
            self._spend(part / self.slowness)
            left -= part
            between()
        self._spend((left + result.forward_seconds) / self.slowness)
        return DoneStep(result)

    def check_integrity(self) -> None: ...

    def close(self) -> None: ...


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What the simulated engines are given: a real engine's document and what its model is.
    `true_item_bytes`: of an item that stands here with fewer; 0: it has them."""

    engine: EngineConfig
    traits: ModelTraits
    num_blocks: int
    max_model_len: int
    largest: dict[str, LargestItem] = {}
    largest_request_bytes: int = 0
    placeholder: int = 3
    item_tokens: int = 576
    item_bytes: int = 350_000
    true_item_bytes: int = 0
    processor_bytes: int = 1 << 30

    def item(self) -> bytes:
        """A value of an item's true size and shape, without a picture in it."""
        head = len(self._pack(0))
        return self._pack(max(self.item_bytes - head, 0))

    def _pack(self, size: int) -> bytes:
        runs = ((0, self.item_tokens),)
        pixels = np.zeros(size, dtype="u1")
        ids = (self.placeholder,) * self.item_tokens
        return pack_item(0, ids, runs, {"x": ("uint8", pixels)})


def fit(rows: Sequence[Sequence[float]] | Table, seconds: Sequence[float] | Table) -> list[float]:
    """Least squares without negative costs. What disturbs a second disturbs each: the variance
    grows with what the fit says. Weighed by what was measured, a step that was slow by chance would
    count for less than one that was fast, and the fit's total be too low."""
    table, wanted = np.array(rows, dtype=float), np.array(seconds, dtype=float)
    level, found = wanted, np.zeros(table.shape[1])
    least = np.median(np.abs(wanted)) / 10
    for _ in range(NUM_FITS):
        found = _not_negative(table, wanted, np.maximum(level, least) ** -0.5)
        level = table @ found
    return [float(value) for value in found]


def _not_negative(table: Table, wanted: Table, weights: Table) -> Table:
    """The most negative cost is left out until none is."""
    kept = [i for i in range(table.shape[1]) if table[:, i].any()]
    found = np.zeros(table.shape[1])
    while kept:
        part = np.linalg.lstsq(table[:, kept] * weights[:, None], wanted * weights, rcond=None)[0]
        if part.min() >= 0:
            found[kept] = part
            break
        del kept[int(part.argmin())]
    return found
