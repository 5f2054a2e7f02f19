"""Hit ratio of the value cache when frontends and engines multiply, for one seeded trace.

The real engine client (routing, mirrors) of each frontend over in-process links to engines without
a model (`frontend.fake_engine`: the real receiver, scripted tokens). A hit is an item whose value
did not have to be sent. 1 frontend x 1 engine with a cache of C bytes is compared with 4 x 2 and
C / 2 for each engine: together the same memory.

    python e2e/bench/simulation/hit_ratio.py                # both, and the difference in points
    python e2e/bench/simulation/hit_ratio.py --seed 7 --requests 10000 --cache 0.1
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.items.prepared import PreparedItem, PreparedRequest
from foveal_runtime.frontend.testing.fake_engine import ScriptedEngine
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.inprocess import InProcessHub
from foveal_runtime.wire.item import meta_of, pack_item, read_header

NAMESPACE = b"n" * 16
ALLOWED_POINTS = 2.0
NEW_IMAGE = 0.5
"""Share of a conversation's turns that bring an image it did not have."""


class Trace(NamedTuple):
    """`requests`: indices of the items of each request."""

    values: list[bytes]
    requests: list[tuple[int, ...]]


class Source:
    """A value that counts how often it had to be sent."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.num_sent = 0

    async def value(self) -> bytes:
        self.num_sent += 1
        return self.data

    def release(self) -> None:
        return


def make_trace(
    seed: int, num_requests: int, num_items: int, most_items: int, num_talks: int = 0
) -> Trace:
    """Popularity falls as 1 / rank^0.9; sizes vary eightfold; 1 to `most_items` a request, each
    drawn alone. With `num_talks`, so many conversations go on at a time: a turn sends all images
    of its conversation so far and perhaps a new one; a full one ends."""
    rng = random.Random(seed)
    values = []
    for index in range(num_items):
        pixels = np.full(rng.randint(1000, 8000), index % 251, dtype="u1")
        values.append(pack_item(0, (1, 2, 3), ((1, 1),), {"x": ("uint8", pixels)}))
    weights = list(accumulate(1 / (rank + 1) ** 0.9 for rank in range(num_items)))
    requests = []
    talks: list[list[int]] = [[] for _ in range(num_talks)]
    for _ in range(num_requests):
        if not talks:
            drawn = rng.choices(range(num_items), cum_weights=weights, k=rng.randint(1, most_items))
            requests.append(tuple(dict.fromkeys(drawn)))
            continue
        talk = rng.choice(talks)
        if not talk or (len(talk) < most_items and rng.random() < NEW_IMAGE):
            talk += rng.choices(range(num_items), cum_weights=weights)
        requests.append(tuple(dict.fromkeys(talk)))
        if len(talk) == most_items and rng.random() < NEW_IMAGE:
            talk.clear()
    return Trace(values, requests)


async def hit_ratio(
    trace: Trace, num_frontends: int, num_engines: int, capacity: int, num_clients: int
) -> float:
    """Plays the trace with `num_clients` at the same time, requests going round the
    frontends; the share of items not sent."""
    hubs: dict[str, InProcessHub] = {}
    engines = []
    limits = ReceiverLimits(capacity_bytes=capacity // num_engines, staging_bytes=64 << 20)
    for index in range(num_engines):
        hub = hubs[f"tcp://e{index}:1"] = InProcessHub()
        engines.append(
            ScriptedEngine(hub, namespace=NAMESPACE, engine_id=f"e{index}", limits=limits)
        )
        engines[-1].start()
    clients = [make_client(hubs) for _ in range(num_frontends)]
    for client in clients:
        await client.start()
    while any(client.num_ready_engines() < num_engines for client in clients):  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # the links have no event for it
    num_items = num_sent = 0
    todo = iter(enumerate(trace.requests))

    async def work() -> None:
        nonlocal num_items, num_sent
        for number, indices in todo:
            request = make_request(number, [(i, trace.values[i]) for i in indices])
            async for _ in clients[number % num_frontends].generate(request):
                pass
            num_items += len(indices)
            num_sent += sum(item.source.num_sent for item in request.items)  # type: ignore[attr-defined]

    await asyncio.gather(*(work() for _ in range(num_clients)))
    for engine in engines:
        engine.receiver.check_integrity()
    for client in clients:
        await client.close()
    for engine in engines:
        await engine.stop()
    return 1 - num_sent / num_items


def make_client(hubs: dict[str, InProcessHub]) -> EngineClient:
    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"),
        engines=tuple(EngineAddress(endpoint=endpoint) for endpoint in hubs),
    )
    client = EngineClient(
        config,
        NAMESPACE,
        open_transport=lambda endpoint: hubs[endpoint].connect(client.frontend_id),
    )
    return client


def make_request(number: int, items: list[tuple[int, bytes]]) -> PreparedRequest:
    prepared = [
        PreparedItem(
            index.to_bytes(32, "big"), 0, Source(data), len(data), meta_of(read_header(data))
        )
        for index, data in items
    ]
    tokens = [5, *([9] * len(items)), 7, number % 1000]
    placements = [(i + 1, i) for i in range(len(items))]
    return PreparedRequest(f"r{number}", tokens, prepared, placements, SamplingParams(max_tokens=2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--items", type=int, default=1000)
    parser.add_argument("--most-items", type=int, default=1, help="in a request")
    parser.add_argument("--talks", type=int, default=0, help="conversations at the same time")
    parser.add_argument("--clients", type=int, default=16, help="requests at the same time")
    parser.add_argument("--cache", type=float, default=0.25, help="C as a share of all values")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # sessions end when they are done
    trace = make_trace(
        options.seed, options.requests, options.items, options.most_items, options.talks
    )
    capacity = int(sum(map(len, trace.values)) * options.cache)
    one = asyncio.run(hit_ratio(trace, 1, 1, capacity, options.clients))
    many = asyncio.run(hit_ratio(trace, 4, 2, capacity, options.clients))
    points = 100 * (many - one)
    print(
        f"seed {options.seed}, {options.requests} requests, {options.items} items, "
        f"at most {options.most_items} each, {options.talks} talks, {options.clients} clients, "
        f"C = {capacity} bytes: 1x1 {one:.2%}, 4x2 with C/2 each {many:.2%}, {points:+.2f} points"
    )
    return 0 if points >= -ALLOWED_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
