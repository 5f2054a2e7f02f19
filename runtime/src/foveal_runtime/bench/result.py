"""The result of one run of one trace on one server, as it stands in the JSON file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from foveal_runtime.bench.client import Reply
from foveal_runtime.bench.stats import percentile

PERCENTS = (50, 90, 99)


class RunResult(msgspec.Struct, kw_only=True):
    """Times in milliseconds where the name says _ms. Percentile maps: "p50", "p90", "p99", "max".

    Attributes:
        ttft_ms: from sending a request to its first piece of text.
        itl_ms: between two pieces of text of a reply (a server may put several tokens in one).
        ttft_by_turn_ms: p50 by turn, for conversations.
        cpu_seconds: by role of process; {} where the server's processes are not seen.
        pss_bytes: likewise, after the run.
        wire_bytes: frontends and engines, both directions; None where it cannot be counted.
        hit_rates: by cache, as the server counts.
        texts_digest: of all replies in trace order; servers that compute the same have the same.
    """

    server: str
    trace: str
    seed: int
    round: int
    wall_seconds: float
    num_requests: int
    num_errors: int
    errors: list[str]
    requests_per_second: float
    output_tokens_per_second: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_ms: dict[str, float]
    itl_ms: dict[str, float]
    ttft_by_turn_ms: list[float | None]
    texts_digest: str
    texts: list[str]
    cpu_seconds: dict[str, float] = {}
    pss_bytes: dict[str, int] = {}
    wire_bytes: int | None = None
    hit_rates: dict[str, float] = {}

    @property
    def total_cpu_seconds(self) -> float:
        return sum(self.cpu_seconds.values())


def summarize(replies: Sequence[Reply], wall_seconds: float) -> dict[str, object]:
    """The fields of a Result that replies alone determine."""
    good = [reply for reply in replies if not reply.error]
    first = [1000 * reply.first_token_seconds for reply in good]
    gaps = [1000 * gap for reply in good for gap in reply.gaps_seconds]
    num_turns = 1 + max((reply.turn for reply in replies), default=0)
    texts = [reply.text for reply in replies]
    num_output = sum(reply.num_output_tokens for reply in good)
    return {
        "wall_seconds": wall_seconds,
        "num_requests": len(replies),
        "num_errors": len(replies) - len(good),
        "errors": sorted({reply.error for reply in replies if reply.error})[:5],
        "requests_per_second": len(good) / wall_seconds,
        "output_tokens_per_second": num_output / wall_seconds,
        "num_prompt_tokens": sum(reply.num_prompt_tokens for reply in good),
        "num_cached_tokens": sum(reply.num_cached_tokens for reply in good),
        "num_output_tokens": num_output,
        "ttft_ms": percentiles(first),
        "itl_ms": percentiles(gaps),
        "ttft_by_turn_ms": [
            percentile([1000 * r.first_token_seconds for r in good if r.turn == turn], 50)
            for turn in range(num_turns)
        ]
        if num_turns > 1
        else [],
        "texts": texts,
        "texts_digest": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"p{p}": percentile(values, p) for p in PERCENTS} | {"max": max(values)}
