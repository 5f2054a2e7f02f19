"""The step's types: the only thing engine/ and model/ exchange. Pure data, no torch.

`Scheduler.schedule()` makes a StepPlan, a `ModelRunner` obeys it and returns a StepResult,
`Scheduler.update()` takes that in. A plan can be encoded with msgspec for tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

from foveal_runtime.plan.lora import LoraRef, LoraSource
from foveal_runtime.plan.media import MMHash, PlaceholderRange
from foveal_runtime.plan.sampling import SamplingParams

TRASH_BLOCK = 0
"""The KV block that belongs to no request: a runner may write padding there."""

if TYPE_CHECKING:
    Buffer = bytes | memoryview
else:
    Buffer = memoryview  # msgspec takes no union here: encodes either, decodes as a view, no copy


class ModelTraits(msgspec.Struct, frozen=True):
    """What the scheduler must know of a model.

    Attributes:
        bidirectional: "none"; "item" (tokens of one item see each other: a chunk never ends
            inside an item and a prefix hit is cut back to its start); "prompt" (prefix-LM: the
            whole prompt is one group).
        eos_token_ids: end a sequence unless ignore_eos.
        embed_width: values per encoder output, `embed_levels` 1 + number of deepstack levels.
        embed_bytes: bytes of one encoder output, all levels.
        embed_kind: names what else encoder outputs depend on (their dtype, the software that
            computes them): outputs of another kind are not taken over from disk.
        value_bytes: bytes of one value that the model computes with.
        state_bytes: bytes of recurrent state of one running request. Such a state exists only at
            the end of what was computed: a prefix can be continued where a snapshot was taken.
        generates: False for an encoder: its requests are embedded.
        grammars: the grammar library and its version that outputs can be bound with; "": none.
    """

    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    is_multimodal: bool
    bidirectional: Literal["none", "item", "prompt"] = "none"
    embed_width: int = 0
    embed_levels: int = 1
    embed_bytes: int = 0
    embed_kind: str = ""
    value_bytes: int = 4
    state_bytes: int = 0
    grammars: str = ""
    generates: bool = True


class MMInput(msgspec.Struct, frozen=True, array_like=True):
    """One occurrence of an item in an expanded prompt."""

    mm_hash: MMHash
    modality: int
    placeholder: PlaceholderRange


class NewRequest(msgspec.Struct, array_like=True):
    """First sight (or re-sight after preemption) of a request by the runner.

    `token_ids` is the expanded prompt followed by output tokens that exist already;
    `num_prompt_tokens` says where outputs begin. `values` maps an item index to its serialised
    value (`wire.item`): what mrope positions need (grids) is read from there; pixels only when an
    EncoderInput names the item. `snapshot` is the slot of the recurrent state that it starts from,
    copied before anything of this step is computed; 0: from an empty one. `lora` is the digest of
    the adapter that it is computed with; b"": none.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    mm_inputs: tuple[MMInput, ...]
    values: tuple[Buffer, ...]
    sampling: SamplingParams
    snapshot: int = 0
    lora: bytes = b""


class ScheduledRequest(msgspec.Struct, array_like=True):
    """Compute positions [num_computed_tokens, num_computed_tokens + num_scheduled_tokens).

    No entry of `block_ids` is TRASH_BLOCK.
    `block_ids` is the whole block table up to the end of this window; the runner must not change
    it. `sample` is True when the window reaches the last known token, so a new one is wanted.
    `snapshot` is the slot that the recurrent state is copied to after the step; 0: none.
    `window_ids` are the blocks of layers with a sliding window, where those have a pool of their
    own: from block number `window_first` on, before which nothing is seen by this window's tokens.
    `draft` are guesses of the tokens after the last known one, and the end of the window: a token
    is drawn for that one and for each of them, and counts as far as the guesses before it were
    right. Nothing is left over of wrong ones but keys and values, which others replace.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    block_ids: list[int]
    sample: bool
    snapshot: int = 0
    window_ids: list[int] = []
    window_first: int = 0
    draft: list[int] = []


class EncoderInput(msgspec.Struct, array_like=True):
    """Encode this item in this step, before the decoder runs."""

    mm_hash: MMHash
    modality: int
    num_embeds: int
    value: Buffer


class StepPlan(msgspec.Struct, array_like=True):
    """Everything one step does, in this order: store, free, drop, load, encode, decode, sample.

    `store_encoder` copies outputs to the host tier (where they stay after a later load),
    `free_encoder` drops outputs from the device (a key that is not there is ignored: its encoding
    had failed), `drop_host_encoder` from the host tier, `load_encoder` copies from host to device.
    `finished` are requests whose state can go. `slice_seconds`: streams wait that are not in this
    plan, and are let in whenever encoding has taken so long; 0: nobody waits.
    """

    step: int
    new: list[NewRequest] = []
    scheduled: list[ScheduledRequest] = []
    encode: list[EncoderInput] = []
    free_encoder: list[MMHash] = []
    store_encoder: list[MMHash] = []
    load_encoder: list[MMHash] = []
    drop_host_encoder: list[MMHash] = []
    finished: list[str] = []
    slice_seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(r.num_scheduled_tokens for r in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(r.draft) for r in self.scheduled)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of windows, as opposed to the one token a stream goes on by, and its guesses."""
        scheduled = self.scheduled
        counts = (entry.num_scheduled_tokens for entry in scheduled if not entry.draft)
        return sum(count for count in counts if count > 1)

    @property
    def moves_something(self) -> bool:
        return bool(
            self.finished
            or self.free_encoder
            or self.store_encoder
            or self.drop_host_encoder
            or self.load_encoder
            or self.encode
        )


class Sampled(msgspec.Struct, array_like=True):
    """One new token; those of a request in order. Logprobs are filled only when it asks."""

    request_id: str
    token_id: int
    logprob: float = 0.0
    rank: int = 0
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of prompt tokens at positions start+1 ... that this step's window determined."""

    request_id: str
    start: int
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_logprobs: tuple[tuple[float, ...], ...]


class Pooled(msgspec.Struct, array_like=True):
    """The embedding of a whole prompt: f32 (E), little-endian, not normalised."""

    request_id: str
    values: bytes


class StepResult(msgspec.Struct, array_like=True):
    """What the runner hands back. `failed` maps a request id to a one-line reason (only that
    request fails, e.g. an encoder returned another number of rows than promised).
    `failed_encodes` maps each key of the plan's `encode` that has no output to the reason: a
    scheduled request that needs it is in `failed` too, but the one it was encoded for may have
    been preempted in the same pass. `impossible` are those of `failed` whose own options left no
    token to choose."""

    step: int
    sampled: list[Sampled] = []
    prompt_logprobs: list[PromptLogprobs] = []
    failed: dict[str, str] = {}
    encode_seconds: float = 0.0
    forward_seconds: float = 0.0
    failed_encodes: dict[MMHash, str] = {}
    pooled: list[Pooled] = []
    impossible: list[str] = []


class RunningStep(Protocol):
    """A step that was submitted."""

    def result(self) -> StepResult:
        """Waits until the step is over. Called once, in the order of submission."""
        ...


class DoneStep:
    """A step that was over when it was submitted."""

    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class RunnerLost(RuntimeError):
    """A process of the runner ended; the engine cannot go on. `is_own`: it crashed, and was not
    killed from outside."""

    is_own = False


@dataclass(slots=True)
class GrammarStats:
    """What grammars have cost an engine.

    Attributes:
        num_lookups, num_hits: sequences that needed a grammar, and that found it compiled.
        num_cached, cached_bytes: compiled grammars held, and the text that they were made of.
        compile_seconds, mask_seconds: in all; masks are made while the step waits.
    """

    num_lookups: int = 0
    num_hits: int = 0
    num_cached: int = 0
    cached_bytes: int = 0
    compile_seconds: float = 0.0
    mask_seconds: float = 0.0


class LoraTable(Protocol):
    """The LoRA adapters that a runner holds."""

    @property
    def refs(self) -> tuple[LoraRef, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    def load(self, source: LoraSource) -> None:
        """Between two steps. Raises StartupError, in one line, for one that cannot be served."""
        ...

    def unload(self, name: str) -> bool:
        """Requests that hold it keep it. False: there is none of this name."""
        ...

    def hold(self, ref: LoraRef) -> object | None:
        """Steps find a loaded adapter by its digest for as long as the result lives, whether or
        not it is unloaded meanwhile. None: it is not loaded."""
        ...


class ModelRunner(Protocol):
    """The seam between engine/ and model/; `testing.fake_runner.FakeRunner` is for tests."""

    @property
    def traits(self) -> ModelTraits: ...

    @property
    def loras(self) -> LoraTable: ...

    @property
    def grammars(self) -> GrammarStats:
        """Read by other threads; one that never changes where no grammars are served."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Obey the plan. Errors of one request go to `failed`; an exception ends the engine."""
        ...

    def submit(self, plan: StepPlan, between: Callable[[], None] | None = None) -> RunningStep:
        """`execute` in two parts. One more plan may be submitted before this one's result is
        taken, if it only continues requests that this one samples. `between` is called in the
        middle of encoding, as `slice_seconds` says, and after it; it executes plans of its own, of
        requests that this plan does not name, and its time is not counted as encoding."""
        ...

    def save_encoder(self, path: str, mm_hashes: Sequence[MMHash]) -> list[MMHash]:
        """Writes those encoder outputs that exist to a new file, in no plan's time; returns their
        keys. Raises OSError."""
        ...

    def load_encoder(
        self, path: str, device: Mapping[MMHash, int], host: Mapping[MMHash, int]
    ) -> list[MMHash]:
        """Takes outputs from such a file before the first plan: those of `device` to the device,
        those of `host` to the host tier, each of so many embeddings. Returns the keys taken; one
        that is missing in the file or has another shape is left out. Raises OSError or ValueError
        for a file that cannot be read."""
        ...

    def check_integrity(self) -> None:
        """Asserts that the runner's own books agree. Between two plans, in the same thread."""
        ...

    def close(self) -> None: ...
