"""Limits of the scheduler: every limit of one engine in one frozen value.

Built by the engine's start-up code from its configuration, the model's traits and the measured
pools; read by `scheduler`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """All counts are per engine.

    Attributes:
        num_blocks, block_size: the KV pool as the runner has it, TRASH_BLOCK included.
        num_reserved_blocks: of those, see `block_pool.BlockPool`.
        max_num_batched_tokens, max_num_seqs: what one step may hold.
        max_num_mixed_tokens: tokens, and embeddings to encode, of a step that also gives a stream
            its next token; 0 = as any other step.
        target_itl_seconds: a step beside streams holds what keeps it within so long, by what steps
            took so far, instead of `max_num_mixed_tokens`; 0 = no target.
        mixed_growth: without a target, such a step takes at most so many times what a step of
            streams alone takes, or 0.6 s; 0 = no such bound. short_growth: so many while only
            prompts wait that are no longer than max_num_mixed_tokens and without media.
        slices_encoding: streams go on in the middle of what takes the encoder longer than that.
        num_speculative_tokens: guessed for a stream at once, at most; 0 = none. draft_match:
            see `engine.types.drafts`, least and most.
        max_model_len: prompt + output tokens of one request.
        max_waiting: requests that may wait; more are refused as overloaded.
        encoder_compute_embeds, encoder_cache_embeds: see `plan.budget.encoder`.
        encoder_host_bytes: host tier; 0 = off.
        encoder_eviction: see `plan.config.EngineCaches`.
        disable_chunked_mm_input: an item's tokens are computed in one step.
        namespace: weights and processor identity, part of every block hash.
        kv_dtype: what the pool keeps, for metrics alone.
        num_snapshots: snapshots of recurrent state that the runner can keep, for models with such;
            0: no prefix is reused then.
        snapshot_tokens: least distance of snapshots that nothing else asks for.
        num_window_blocks: the KV pool of layers with a sliding window, TRASH_BLOCK included; 0:
            they share the other one. window: tokens that they see, the newest one included.
    """

    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_reserved_blocks: int = 0
    max_num_mixed_tokens: int = 0
    target_itl_seconds: float = 0.0
    mixed_growth: float = 0.0
    short_growth: float = 0.0
    slices_encoding: bool = False
    max_waiting: int = 1024
    num_speculative_tokens: int = 0
    draft_match: tuple[int, int] = (2, 4)
    policy: Literal["fcfs", "priority"] = "fcfs"
    disable_chunked_mm_input: bool = False
    encoder_compute_embeds: int = 0
    encoder_cache_embeds: int = 0
    encoder_host_bytes: int = 0
    encoder_eviction: Literal["lru", "cost"] = "lru"
    prefix_caching: bool = True
    namespace: bytes = b""
    kv_dtype: str = "auto"
    num_snapshots: int = 0
    snapshot_tokens: int = 0
    num_window_blocks: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        assert self.num_blocks > 1
        assert self.block_size > 0
        assert self.max_num_batched_tokens > 0
        assert self.max_num_seqs > 0
        assert self.max_model_len > 1
        assert not self.num_window_blocks or (self.window > 0 and not self.num_snapshots)

    @property
    def kv_tokens(self) -> int:
        """Tokens that requests can have in the pool together."""
        return (self.num_blocks - 1) * self.block_size
