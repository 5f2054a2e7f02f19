"""One request inside the engine: its expanded tokens, its items, how far it has been computed.

Made by `core` (after `splice`), owned and changed by `scheduler`; holds no cache's state, only
which blocks and encoder references the request has. Never decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum

from foveal_runtime.engine.types.drafts import Drafts
from foveal_runtime.engine.types.step import MMInput, PromptLogprobs
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import MMHash
from foveal_runtime.plan.sampling import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """State of one sequence.

    Attributes:
        request_id: unique in this engine's life (the runner's key).
        session, rid: who asked: opaque to the scheduler, used by `core` to answer.
        token_ids: expanded prompt, then outputs of earlier attempts, then outputs made here.
        num_tokens: len(token_ids), kept as a number because it is read on each step.
        num_computed: positions whose KV is in this request's blocks.
        num_emitted: outputs of earlier attempts inside token_ids.
        values: serialised item of each entry of mm_inputs, views on the value pool; empty where
            the value was released (`num_released` counts those).
        next_mm: index of the first entry of mm_inputs that ends after num_computed.
        key, on_trial, lora: see `wire.messages.RequestBody`. lora_held: see `LoraTable.hold`.
        block_ids: KV blocks, in order. num_published: how many of them the prefix cache knows.
        window_ids, window_first: see `ScheduledRequest`. window_kept: numbers of those blocks, from
            and to, that are evicted later than others.
        block_hashes: hashes of the full blocks of token_ids, made once and kept.
        cuts: positions to come, in order, at which a chunk must end so that recurrent state can be
            kept there. state_end: where the last snapshot was taken, or it started from one.
        pending, rolling: slots that running steps fill; the last one of outputs, 0: none.
        drafts: guesses of its next tokens; None: nothing is guessed.
        is_withdrawn: made from a wrong value since it was admitted: nobody gets its snapshots.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    _: KW_ONLY
    num_prompt_tokens: int = 0
    mm_inputs: tuple[MMInput, ...] = ()
    values: tuple[bytes | memoryview, ...] = ()
    rid: tuple[str, int] = ("", 0)
    session: str = ""
    priority: int = 0
    cache_salt: bytes = b""
    lora: LoraRef | None = None
    lora_held: object | None = None
    read_prefix_cache: bool = True
    echo_prompt: bool = False
    num_mm_hits: int = 0
    arrival_seconds: float = 0.0
    key: bytes = b""
    on_trial: bool = False

    num_tokens: int = field(init=False)
    num_emitted: int = field(init=False)
    mm_embeds: tuple[int, ...] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    status: Status = field(default=Status.WAITING, init=False)
    sequence: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)
    step: int = field(default=-1, init=False)
    next_mm: int = field(default=0, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    num_published: int = field(default=0, init=False)
    window_ids: list[int] = field(default_factory=list, init=False)
    window_first: int = field(default=0, init=False)
    window_kept: set[tuple[int, int]] = field(default_factory=set, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    hash_mm: int = field(default=0, init=False)
    cuts: list[int] = field(default_factory=list, init=False)
    state_end: int = field(default=0, init=False)
    pending: list[int] = field(default_factory=list, init=False)
    rolling: int = field(default=0, init=False)
    drafts: Drafts | None = field(default=None, init=False)
    is_withdrawn: bool = field(default=False, init=False)
    num_released: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_encoded: int = field(default=0, init=False)
    num_encoder_hits: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    known_to_runner: bool = field(default=False, init=False)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list, init=False)
    output_limit_tokens: int = field(default=0, init=False)
    admit_seconds: float = field(default=0.0, init=False)
    encoder_since: float = field(default=0.0, init=False)
    """When its next items first did not fit the encoder budget."""
    first_seconds: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        assert len(self.mm_inputs) == len(self.values)
        self.num_tokens = len(self.token_ids)
        self.num_prompt_tokens = self.num_prompt_tokens or self.num_tokens
        self.num_emitted = self.num_tokens - self.num_prompt_tokens
        self.mm_embeds = tuple(entry.placeholder.num_embeds for entry in self.mm_inputs)
        self.read_prefix_cache = self.read_prefix_cache and self.sampling.reads_prefix
        self.stop_ids = frozenset(self.sampling.stop_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Outputs over all attempts: what max_tokens and min_tokens count."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def lacks_one_token(self) -> bool:
        """Whether one token is left to compute, be it the prompt's last, and no item is to come."""
        left = self.num_tokens - self.num_computed
        return left == 1 and self.next_mm == len(self.mm_inputs)

    @property
    def is_decoding(self) -> bool:
        """Whether its prompt is computed, and all of its outputs but the newest."""
        return self.num_tokens - 1 == self.num_computed >= self.num_prompt_tokens

    def release_value(self, index: int) -> None:
        """The value of an item is not needed any more, as long as the request keeps running."""
        if self.values[index]:
            self.values = (*self.values[:index], b"", *self.values[index + 1 :])
            self.num_released += 1

    def restore_values(self, values: Mapping[MMHash, memoryview]) -> None:
        self.values = tuple(values[entry.mm_hash] for entry in self.mm_inputs)
        self.num_released = 0

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, "
            f"{self.num_computed}/{self.num_tokens} tokens, {len(self.block_ids)} blocks)"
        )
