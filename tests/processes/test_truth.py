"""Right answers from real processes, whatever the caches hold."""

from __future__ import annotations

import concurrent.futures
import random

import pytest

pytestmark = pytest.mark.timeout(900)


OPTIONS = [
    {"processor_bytes": 0, "ipc_bytes": 0},
    {"processor_bytes": 0},
    {"ipc_bytes": 0},
    {"prefix_caching": False},
    {"processor_bytes": 0, "ipc_bytes": 0, "prefix_caching": False, "encoder_embeds": 36},
    {"ipc_bytes": 24 * 1024, "processor_bytes": 24 * 1024},
    {"max_num_batched_tokens": 24, "encoder_embeds": 72, "block_size": 8},
    {"ipc_type": "shm"},
    {"attention": "torch"},
    {"num_speculative_tokens": 4},
]


def test_every_family_is_answered_right(shared, samples):
    _, asker = shared
    for sample in samples:
        asker.check(sample)


def test_mixed_order_with_warm_caches(shared, mixed):
    _, asker = shared
    for sample in mixed:
        asker.check(sample)
    assert asker.metric("vllm:mm_cache_hits_total") > 0
    assert asker.metric("vllm:prefix_cache_hits_total") > 0


@pytest.mark.extended
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items())
)
def test_answers_do_not_depend_on_cache_sizes(start, mixed, options):
    """Each is a deployment of its own. The first is the case that has failed before: prefix caching
    with processor and IPC caches off."""
    _, (asker,) = start(**options)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(asker.check, mixed))


def test_concurrent_mixed_requests(shared, mixed):
    _, asker = shared
    order = mixed * 2
    random.Random(11).shuffle(order)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        list(pool.map(asker.check, order))
