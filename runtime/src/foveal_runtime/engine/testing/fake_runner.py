"""A model runner without a model: obeys plans exactly and answers from what the KV slots hold.

Used by tests, by the simulator and for trying the data plane without weights. Each KV slot holds a
number made of what was computed into it (token, item content, position), and the next token is a
hash over the slots the block table names: a wrong prefix hit, a block given away too early or a
wrong encoder output changes the tokens, as it would in a model. Each rule of the plan is asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from blake3 import blake3

from foveal_runtime.engine.types.step import (
    TRASH_BLOCK,
    DoneStep,
    GrammarStats,
    MMInput,
    ModelTraits,
    NewRequest,
    Pooled,
    PromptLogprobs,
    Sampled,
    ScheduledRequest,
    StepPlan,
    StepResult,
)
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.lora import LoraRef, LoraSource
from foveal_runtime.plan.media import MMHash
from foveal_runtime.plan.sampling import SamplingParams

_PLACE = np.uint64(0x9E3779B97F4A7C15)
_EMPTY = np.uint64(0)

FAKE_TRAITS = ModelTraits(
    vocab_size=32_000,
    max_position=1 << 20,
    eos_token_ids=(2,),
    is_multimodal=True,
    embed_width=8,
    embed_bytes=32,
)


def content(value: bytes | memoryview) -> int:
    """What encoding an item yields: a number that depends on all of its bytes."""
    return int.from_bytes(blake3(value).digest(length=8), "little")


def slots_of(
    token_ids: Sequence[int], inputs: Sequence[MMInput], contents: dict[MMHash, int], start: int
) -> np.ndarray:
    """The numbers for positions start ... start + len(token_ids): uint64.

    Args:
        token_ids: ids of these positions.
        contents: encoder outputs; a KeyError means one is missing that is needed.
    """
    stop = start + len(token_ids)
    out = np.array(token_ids, dtype=np.uint64)
    for entry in inputs:
        place = entry.placeholder
        for run, length in place.embed_runs:
            begin, end = max(place.offset + run, start), min(place.offset + run + length, stop)
            if begin < end:
                index = np.arange(begin - place.offset, end - place.offset, dtype=np.uint64)
                out[begin - start : end - start] = index + np.uint64(contents[entry.mm_hash])
    return out + np.arange(start + 1, stop + 1, dtype=np.uint64) * _PLACE


def _folded(slots: np.ndarray) -> int:
    return int(np.add.reduce(slots * slots + slots * _PLACE))


def next_token(slots: np.ndarray, sampling: SamplingParams, vocab_size: int) -> int:
    digest = blake3(sampling.seed.to_bytes(8, "little") + slots.tobytes()).digest(length=8)
    return int.from_bytes(digest, "little") % vocab_size


def embedding_of(slots: np.ndarray) -> bytes:
    """f32 values that depend on all of the slots."""
    digest = blake3(slots.tobytes()).digest(length=8)
    return np.frombuffer(digest, np.uint8).astype("<f4").tobytes()


def reference_embedding(
    token_ids: Sequence[int],
    inputs: Sequence[MMInput],
    values: Sequence[bytes | memoryview],
    pooling: str,
) -> bytes:
    """The embedding of a prompt, without any cache or scheduler."""
    contents = {entry.mm_hash: content(value) for entry, value in zip(inputs, values, strict=True)}
    slots = slots_of(token_ids, inputs, contents, 0)
    return embedding_of(slots[:1] if pooling == "cls" else slots)


def reference_tokens(
    token_ids: Sequence[int],
    inputs: Sequence[MMInput],
    values: Sequence[bytes | memoryview],
    sampling: SamplingParams,
    num_tokens: int,
    traits: ModelTraits = FAKE_TRAITS,
) -> list[int]:
    """What a request must produce: computed straight through, without any cache or scheduler, and
    without stop rules."""
    contents = {entry.mm_hash: content(value) for entry, value in zip(inputs, values, strict=True)}
    slots = slots_of(token_ids, inputs, contents, 0)
    out: list[int] = []
    for _ in range(num_tokens):
        out.append(next_token(slots, sampling, traits.vocab_size))
        last = slots_of(out[-1:], (), {}, len(slots))
        slots = np.concatenate([slots, last])
    return out


def reference_finish(
    tokens: Sequence[int], sampling: SamplingParams, traits: ModelTraits = FAKE_TRAITS
) -> tuple[list[int], str]:
    """What a request keeps of reference tokens, as many as it may make over all attempts, and how
    it ends: with its first stop token, or "length"."""
    stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else traits.eos_token_ids)}
    for count, token in enumerate(tokens, 1):
        if token in stops and count > sampling.min_tokens:
            return list(tokens[:count]), "stop"
    return list(tokens), "length"


class FakeLoras:
    """Adapters without tensors: an adapter's content is its path. One at `bad` cannot be loaded,
    one at `broken` fails."""

    num_bytes = 0

    def __init__(self) -> None:
        self.refs: tuple[LoraRef, ...] = ()

    def load(self, source: LoraSource) -> None:
        if source.path == "bad":
            raise StartupError(f"LoRA adapter {source.name!r}: it is bad")
        if source.path == "broken":
            raise MemoryError("it does not fit")
        self.refs += (LoraRef(source.name, blake3(source.path.encode()).digest(length=16)),)

    def unload(self, name: str) -> bool:
        before, self.refs = self.refs, tuple(ref for ref in self.refs if ref.name != name)
        return before != self.refs

    def hold(self, ref: LoraRef) -> object | None:
        return ref if ref in self.refs else None


class _State:
    """The runner's own copy of a request."""

    def __init__(self, new: NewRequest) -> None:
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.inputs = new.mm_inputs
        self.sampling = new.sampling
        self.lora = np.uint64(content(new.lora) if new.lora else 0)
        self.pooled: list[np.ndarray] = []  # numbers of the positions computed here
        self.end, self.state = 0, 0  # tokens that the recurrent state has seen


class _FakeStep(DoneStep):
    """Counts that its result is taken, and once."""

    def __init__(self, runner: FakeRunner, result: StepResult) -> None:
        super().__init__(result)
        self._runner = runner

    def result(self) -> StepResult:
        self._runner.took()
        return super().result()


class FakeRunner:
    """A runner without a model. One per engine.

    Args:
        on_execute: called with each plan before it is obeyed (a test's window into the step).
        costs: seconds of a step, of each prompt token in it and of each embedding encoded; they
            are reported, not spent.
        failures: reason by request id: those requests fail when they are next scheduled.
        bad_values: content numbers whose encoding fails.
        num_window_blocks, window: see SchedulerLimits.
    """

    def __init__(
        self,
        *,
        num_blocks: int,  # TRASH_BLOCK included
        block_size: int,
        traits: ModelTraits = FAKE_TRAITS,
        encoder_cache_embeds: int | None = None,
        on_execute: Callable[[StepPlan], None] | None = None,
        costs: tuple[float, float, float] = (0.0, 0.0, 0.0),
        num_window_blocks: int = 0,
        window: int = 0,
    ) -> None:
        self._traits = traits
        self.grammars = GrammarStats()
        self.loras = FakeLoras()
        self.costs = costs
        self._block_size = block_size
        self._kv = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._window_kv = np.zeros(num_window_blocks * block_size, dtype=np.uint64)
        self._window = window
        self._requests: dict[str, _State] = {}
        self.snapshots: dict[int, tuple[int, int]] = {}
        self._encoder_cache_embeds = encoder_cache_embeds
        self._on_execute = on_execute
        self.device: dict[MMHash, int] = {}
        self.host: dict[MMHash, int] = {}
        self.sizes: dict[MMHash, int] = {}
        self.failures: dict[str, str] = {}
        self._broken: dict[str, str] = {}
        self.bad_values: set[int] = set()
        self.num_encoded = 0
        self.num_computed_tokens = 0
        self.seconds = 0.0  # that all steps have taken by their costs
        self.closed = False
        self._num_submitted = 0
        self._between: Callable[[], None] | None = None  # of the plan that is submitted

    @property
    def traits(self) -> ModelTraits:
        return self._traits

    @property
    def request_ids(self) -> set[str]:
        return set(self._requests)

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.closed
        if self._on_execute is not None:
            self._on_execute(plan)
        for request_id in plan.finished:
            del self._requests[request_id]
            self._broken.pop(request_id, None)
        for new in plan.new:
            self._broken.pop(new.request_id, None)
            state = self._requests[new.request_id] = _State(new)
            if new.snapshot:
                state.end, state.state = self.snapshots[new.snapshot]
        self._move_outputs(plan)
        result = StepResult(plan.step)
        step, token, embed = self.costs
        result.encode_seconds = embed * sum(entry.num_embeds for entry in plan.encode)
        self._encode(plan, result)
        between, self._between = self._between, None
        left = result.encode_seconds
        while between is not None and plan.slice_seconds and left > 0:
            part = min(left, plan.slice_seconds)
            self.seconds += part
            left -= part
            between()
        used: dict[int, str] = {}
        used_windows: dict[int, str] = {}
        for entry in plan.scheduled:
            self._check_writes(entry, entry.block_ids, 0, used)
            if len(self._window_kv):
                self._check_writes(entry, entry.window_ids, entry.window_first, used_windows)
        for entry in plan.scheduled:
            self._run(entry, result)
        result.forward_seconds = step + token * plan.num_prompt_tokens
        self.seconds += left + result.forward_seconds
        return result

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> DoneStep:
        assert self._num_submitted < 2, "two steps are under way already"
        self._num_submitted += 1
        self._between = between
        return _FakeStep(self, self.execute(plan))

    def took(self) -> None:
        self._num_submitted -= 1

    def save_encoder(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        held = {**self.host, **self.device}
        saved = [mm_hash for mm_hash in mm_hashes if mm_hash in held]
        rows = {key.hex(): (held[key], self.sizes[key]) for key in saved}
        Path(path).write_bytes(msgspec.json.encode(rows))
        return saved

    def load_encoder(
        self, path: str, device: Mapping[MMHash, int], host: Mapping[MMHash, int]
    ) -> list[MMHash]:
        rows = msgspec.json.decode(Path(path).read_bytes(), type=dict[str, tuple[int, int]])
        taken = []
        for tier, wanted in ((self.device, device), (self.host, host)):
            for mm_hash, num_embeds in wanted.items():
                number, size = rows.get(mm_hash.hex(), (0, 0))
                if size == num_embeds:
                    tier[mm_hash] = number
                    self.sizes[mm_hash] = size
                    taken.append(mm_hash)
        return taken

    def check_integrity(self) -> None:
        held = {*self.device, *self.host}
        assert held <= self.sizes.keys(), "an output without a size"

    def close(self) -> None:
        self.closed = True

    def _move_outputs(self, plan: StepPlan) -> None:
        for mm_hash in plan.store_encoder:
            assert mm_hash not in self.host, "stored twice"
            self.host[mm_hash] = self.device[mm_hash]
        for mm_hash in plan.free_encoder:
            self.device.pop(mm_hash, None)
        for mm_hash in plan.drop_host_encoder:
            del self.host[mm_hash]
        for mm_hash in plan.load_encoder:
            assert mm_hash not in self.device, "loaded twice"
            self.device[mm_hash] = self.host[mm_hash]

    def _encode(self, plan: StepPlan, result: StepResult) -> None:
        for entry in plan.encode:
            assert entry.mm_hash not in self.device, "encoded twice"
            number = content(entry.value)
            if number in self.bad_values:
                result.failed_encodes[entry.mm_hash] = "bad value"
                continue
            self.device[entry.mm_hash] = number
            self.sizes[entry.mm_hash] = entry.num_embeds
            self.num_encoded += 1
        if self._encoder_cache_embeds is not None:
            held = sum(self.sizes[mm_hash] for mm_hash in self.device)
            assert held <= self._encoder_cache_embeds, "more outputs than the cache holds"

    def _check_writes(
        self, entry: ScheduledRequest, block_ids: list[int], first: int, used: dict[int, str]
    ) -> None:
        """No block is written by two requests in one step."""
        size = self._block_size
        start, stop = entry.num_computed_tokens, entry.num_computed_tokens
        stop += entry.num_scheduled_tokens
        assert entry.num_scheduled_tokens > 0
        assert first * size <= start
        assert stop <= (first + len(block_ids)) * size
        assert TRASH_BLOCK not in block_ids
        for block in block_ids[start // size - first : -(-stop // size) - first]:
            assert used.setdefault(block, entry.request_id) == entry.request_id, "block shared"

    def _run(self, entry: ScheduledRequest, result: StepResult) -> None:
        if entry.request_id in self._broken:  # submitted before anybody knew
            result.failed[entry.request_id] = self._broken[entry.request_id]
            return
        state = self._requests[entry.request_id]
        start = entry.num_computed_tokens
        stop = start + entry.num_scheduled_tokens
        ids = state.token_ids + entry.draft
        assert stop <= len(ids)
        assert entry.sample == (stop == len(ids))
        assert entry.sample or not entry.draft
        self._check_groups(state, start, stop)
        reason = self.failures.pop(entry.request_id, "")
        needs = self._needs(state, start, stop)
        if needs & result.failed_encodes.keys():
            reason = "the encoder returned another number of rows than promised"
        if reason:
            result.failed[entry.request_id] = self._broken[entry.request_id] = reason
            return
        assert needs <= self.device.keys(), "an encoder output is missing"
        table = np.array(entry.block_ids, dtype=np.int64)
        where = np.arange(stop)
        slots = table[where // self._block_size] * self._block_size + where % self._block_size
        values = slots_of(ids[start:stop], state.inputs, self.device, start)
        values += state.lora  # a block that another adapter computed shows
        self._kv[slots[start:]] = values
        self.num_computed_tokens += stop - start
        held = self._kv[slots]
        assert not (held == _EMPTY).any(), "a slot is read that was never written"
        if len(self._window_kv):
            self._check_window(entry, values, held)
        if self._traits.state_bytes:
            self._advance(state, start, values, held)
            if entry.snapshot:
                self.snapshots[entry.snapshot] = state.end, state.state
        if state.sampling.prompt_logprobs >= 0 and start < state.num_prompt_tokens:
            last = min(stop, state.num_prompt_tokens - 1)
            count = max(last - start, 0)
            top: tuple[tuple[()], ...] = ((),) * count
            part = PromptLogprobs(entry.request_id, start, (-1.0,) * count, (1,) * count, top, top)
            result.prompt_logprobs.append(part)
        if state.sampling.pooling:
            state.pooled.append(values)
            if entry.sample:
                result.pooled.append(Pooled(entry.request_id, self._pool(state, held)))
        elif entry.sample:
            for guess in (*entry.draft, None):
                seen = held[: len(state.token_ids)]
                token = next_token(seen, state.sampling, self._traits.vocab_size)
                state.token_ids.append(token)
                result.sampled.append(Sampled(entry.request_id, token, -1.0, 1))
                if token != guess:
                    break

    def _check_window(self, entry: ScheduledRequest, values: np.ndarray, held: np.ndarray) -> None:
        """What the step's tokens see through the window is what the other layers hold there."""
        start, stop = entry.num_computed_tokens, len(held)
        seen = np.arange(max(start - self._window + 1, 0), stop)
        numbers = seen // self._block_size - entry.window_first
        assert numbers.min() >= 0, "a block is seen that was given back"
        table = np.array(entry.window_ids, dtype=np.int64)
        slots = table[numbers] * self._block_size + seen % self._block_size
        self._window_kv[slots[start - seen[0] :]] = values
        same = self._window_kv[slots] == held[seen]
        assert same.all(), "a window's block holds something else"

    def _pool(self, state: _State, held: np.ndarray) -> bytes:
        """The last token's depends on all that its slots hold, as a hidden state does; the others
        on the positions that were computed for this request."""
        if state.sampling.pooling == "last":
            return embedding_of(held)
        computed = np.concatenate(state.pooled)
        assert len(computed) == len(held), "positions that nobody computed cannot be pooled"
        return embedding_of(computed if state.sampling.pooling == "mean" else computed[:1])

    def _advance(self, state: _State, start: int, values: np.ndarray, held: np.ndarray) -> None:
        """The recurrent state is a sum over everything before: a wrong or an old snapshot shows."""
        assert state.end == start, "the state is at another position than the tokens"
        state.state = (state.state + _folded(values)) % (1 << 64)
        state.end += len(values)
        assert state.state == _folded(held), "the state has seen other tokens than the KV"

    def _needs(self, state: _State, start: int, stop: int) -> set[MMHash]:
        ends = [(entry.mm_hash, entry.placeholder.embeds_before) for entry in state.inputs]
        return {mm_hash for mm_hash, before in ends if before(stop) > before(start)}

    def _check_groups(self, state: _State, start: int, stop: int) -> None:
        kind = self._traits.bidirectional
        if kind == "prompt" and start < state.num_prompt_tokens:
            assert start == 0, "a part of the prompt was taken from elsewhere"
            assert stop >= state.num_prompt_tokens, "the prompt was cut"
        if kind == "item":
            for entry in state.inputs:
                place = entry.placeholder
                for edge in (start, stop):
                    assert not place.offset < edge < place.end, "an item was cut"
