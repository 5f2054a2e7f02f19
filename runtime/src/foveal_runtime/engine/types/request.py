"""One request inside the engine: its expanded tokens, its items, how far it has been computed.

Made by `core` (after `splice`), owned and changed by `scheduler`; holds no cache's state, only
which blocks and encoder references the request has. Never decides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from foveal_runtime.engine.types.step import MMInput, PromptLogprobs
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import MMHash
from foveal_runtime.plan.sampling import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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
        block_hashes: hashes of the full blocks of token_ids, made once and kept.
        cuts: positions to come, in order, at which a chunk must end so that recurrent state can be
            kept there. state_end: where the last snapshot was taken, or it started from one.
        pending, rolling: slots that running steps fill; the last one of outputs, 0: none.
        is_withdrawn: made from a wrong value since it was admitted: nobody gets its snapshots.
    """

    __slots__ = (
        "admit_seconds",
        "arrival_seconds",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "cuts",
        "echo_prompt",
        "encoder_since",
        "first_seconds",
        "frontend_seconds",
        "hash_mm",
        "is_withdrawn",
        "key",
        "known_to_runner",
        "lora",
        "lora_held",
        "mm_embeds",
        "mm_inputs",
        "next_mm",
        "num_cached_tokens",
        "num_computed",
        "num_emitted",
        "num_encoded",
        "num_encoder_hits",
        "num_mm_hits",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "num_released",
        "num_tokens",
        "on_trial",
        "output_limit_tokens",
        "pending",
        "priority",
        "prompt_logprobs",
        "read_prefix_cache",
        "request_id",
        "rid",
        "rolling",
        "sampling",
        "sequence",
        "session",
        "state_end",
        "status",
        "step",
        "stop_ids",
        "token_ids",
        "values",
    )

    def __init__(
        self,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int | None = None,
        mm_inputs: tuple[MMInput, ...] = (),
        values: tuple[bytes | memoryview, ...] = (),
        rid: tuple[str, int] = ("", 0),
        session: str = "",
        priority: int = 0,
        cache_salt: bytes = b"",
        lora: LoraRef | None = None,
        lora_held: object | None = None,
        read_prefix_cache: bool = True,
        echo_prompt: bool = False,
        num_mm_hits: int = 0,
        arrival_seconds: float = 0.0,
        frontend_seconds: float = 0.0,
        key: bytes = b"",
        on_trial: bool = False,
    ) -> None:
        assert len(mm_inputs) == len(values)
        self.request_id = request_id
        self.rid = rid
        self.session = session
        self.key = key
        self.on_trial = on_trial
        self.token_ids = token_ids
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = num_prompt_tokens or len(token_ids)
        self.num_emitted = self.num_tokens - self.num_prompt_tokens
        self.sampling = sampling
        self.mm_inputs = mm_inputs
        self.mm_embeds = tuple(entry.placeholder.num_embeds for entry in mm_inputs)
        self.values = values
        self.priority = priority
        self.cache_salt = cache_salt
        self.lora, self.lora_held = lora, lora_held
        self.read_prefix_cache = read_prefix_cache and sampling.reads_prefix
        self.echo_prompt = echo_prompt
        self.num_mm_hits = num_mm_hits
        self.status = Status.WAITING
        self.sequence = 0
        self.num_computed = 0
        self.step = -1
        self.next_mm = 0
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.hash_mm = 0
        self.num_published = 0
        self.cuts: list[int] = []
        self.state_end = 0
        self.pending: list[int] = []
        self.rolling = 0
        self.is_withdrawn = False
        self.num_released = 0
        self.num_cached_tokens = 0
        self.num_encoded = self.num_encoder_hits = 0
        self.num_preemptions = 0
        self.known_to_runner = False
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.stop_ids = frozenset(sampling.stop_token_ids)
        self.output_limit_tokens = 0
        self.arrival_seconds = arrival_seconds
        self.frontend_seconds = frontend_seconds
        self.admit_seconds = 0.0
        self.encoder_since = 0.0  # when its next items first did not fit the encoder budget
        self.first_seconds = 0.0

    @property
    def num_output_tokens(self) -> int:
        """Outputs over all attempts: what max_tokens and min_tokens count."""
        return self.num_tokens - self.num_prompt_tokens

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
