"""1,000 frontends x 200 engines through a day, on two cores.

Real, and as many as there are: engines (`EngineCore`: receiver, scheduler, encoder and prefix
cache), routers and processor caches. Shared: links and mirrors, which at all frontends tell the
same, stand in `num_clients` copies; each serves the frontends that fall to it, with their own
routers. Shrunk by one factor: the day, the catalogue, and all caches. Hit ratios depend on the
order of requests and on the size of caches beside the catalogue, not on seconds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec

from e2e.bench.simulation.costs import Costs, Deployment, Role
from e2e.bench.simulation.virtual import run
from e2e.bench.simulation.world import Ask, World, connect
from foveal_runtime.bench.stats import percentile
from foveal_runtime.engine.process.load_reports import PER_SECOND
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.routing import Candidate, Pick, Router

HOURS = 24
RATES = ("heard", "heard_bytes", "tokens", "values")
MOST_IMAGES = 4
MOST_TURNS = 12
WHO: ContextVar[int] = ContextVar("frontend")


class Day(NamedTuple):
    """`rate`: requests a second and engine, on the mean of the day; `swing`: of the day's sine, the
    peak is `1 + swing` times the mean. Images of 'catalogue' are wanted as 1 / rank^`skew`;
    `new`: the share of pictures that nobody else has."""

    requests: int
    rate: float
    catalogue: int
    swing: float = 0.6
    skew: float = 0.9
    new: float = 0.3
    turns: float = 2.5
    think_seconds: float = 0.5
    words: int = 40
    reply: int = 4


class FleetRouter(Router):
    """The routers of the frontends that share a client: each its own memory."""

    def __init__(self) -> None:
        super().__init__()
        self._of: dict[int, Router] = {}

    def _own(self) -> Router:
        return self._of.setdefault(WHO.get(), Router())

    def choose(
        self, candidates: Sequence[Candidate], affinity: Sequence[bytes], home: bytes = b""
    ) -> Pick | None:
        return self._own().choose(candidates, affinity, home)

    def commit(self, name: str, affinity: Iterable[bytes]) -> None:
        self._own().commit(name, affinity)


class RoundRobin(Router):
    """The control: engines in turn, whatever they hold."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def choose(
        self, candidates: Sequence[Candidate], affinity: Sequence[bytes], home: bytes = b""
    ) -> Pick | None:
        self._next += 1
        return Pick(candidates[self._next % len(candidates)].name, "load") if candidates else None


class Pictures:
    """Which pictures conversations show."""

    def __init__(self, day: Day, rng: random.Random) -> None:
        self._day, self._rng = day, rng
        ranks = range(1, day.catalogue + 1)
        self._weights = list(accumulate(1 / rank**day.skew for rank in ranks))
        self._newest = day.catalogue

    def pick(self) -> int:
        if self._rng.random() < self._day.new:
            self._newest += 1
            return self._newest
        return self._rng.choices(range(self._day.catalogue), cum_weights=self._weights)[0]


class Hour(msgspec.Struct, kw_only=True):
    """An hour of the shrunk day. Rates are those of the whole fleet unless the name says less;
    `busy`: share of the time that engines compute, on the mean and of the busiest one."""

    hour: int
    requests: int
    hits: dict[str, float]
    value_bytes_per_second: float
    control_bytes_per_second: float
    engine_messages_per_second: float
    frontend_messages_per_second: float
    ttft_p50: float
    ttft_p99: float
    busy_mean: float
    busy_most: float


class Fleet:
    """One day of one fleet."""

    def __init__(self, world: World, listener: EngineClient, day: Day, seed: int) -> None:
        self.world, self.listener, self.day = world, listener, day
        self.rng = random.Random(seed)
        self.pictures = Pictures(day, self.rng)
        self.num_frontends = len(world.frontends)
        self.hours: list[Hour] = []
        self.value_scale = self.world.deployment.true_item_bytes / len(world.item)
        self._talks: set[asyncio.Task[None]] = set()
        self.asked = self.answered = 0

    def _ask(self, images: Sequence[int], said: list[int]) -> Ask:
        words = [self.rng.randrange(100, 8000) for _ in range(self.day.words)]
        mark = self.world.deployment.placeholder
        said += [mark] * (len(images) - said.count(mark)) + words
        return Ask([1, *said], tuple(images), tuple(words[: self.day.reply]))

    async def _talk(self, frontend: int) -> None:
        """A conversation: each turn with all that was said and shown before."""
        WHO.set(frontend)
        images: list[int] = [self.pictures.pick()]
        said: list[int] = []
        for _ in range(MOST_TURNS):
            ask = self._ask(images, said)
            self.asked += 1
            await self.world.ask(frontend, ask)
            self.answered += 1
            said += ask.reply
            if self.rng.random() < 1 / self.day.turns or self.asked >= self.day.requests:
                return
            await asyncio.sleep(self.rng.expovariate(1 / self.day.think_seconds))
            if len(images) < MOST_IMAGES and self.rng.random() < 0.3:
                images.append(self.pictures.pick())

    async def play(self) -> None:
        day, loop = self.day, asyncio.get_running_loop()
        engines = len(self.world.engines)
        mean = day.rate * engines
        hour_seconds = day.requests / mean / HOURS
        for hour in range(HOURS):
            before = self._reading()
            self.world.answers.clear()
            rate = mean * (1 + day.swing * math.sin(2 * math.pi * (hour - 9) / HOURS))
            end = loop.time() + hour_seconds
            while True:
                pause = self.rng.expovariate(rate / day.turns)
                if loop.time() + pause >= end:
                    await asyncio.sleep(max(end - loop.time(), 0))
                    break
                await asyncio.sleep(pause)
                talk = asyncio.create_task(self._talk(self.rng.randrange(self.num_frontends)))
                self._talks.add(talk)
                talk.add_done_callback(self._talks.discard)
            self.hours.append(self._hour(hour, before, self._reading(), hour_seconds))
        await asyncio.gather(*self._talks)

    def _reading(self) -> dict[str, Any]:
        links = [link for client in self.world.clients for link in client.links()]
        engines = list(self.world.engines.values())
        heard = [engine.links[self.listener.frontend_id].counters for engine in engines]
        return {
            "hits": self.world.hits(),
            "values": sum(sum(k.sender.stats.bytes_sent.values()) for k in links),
            "heard": sum(one.messages_received for one in heard),
            "heard_bytes": sum(one.bytes_received for one in heard),
            "tokens": sum(e.core.stats.num_generation_tokens for e in engines),
            "busy": [e.step_seconds for e in engines],
        }

    def _hour(
        self, hour: int, before: dict[str, Any], after: dict[str, Any], seconds: float
    ) -> Hour:
        """What the listener hears every frontend hears; beside it, a message for each token."""
        hits = {}
        for name, (found, asked) in after["hits"].items():
            old = before["hits"][name]
            hits[name] = (found - old[0]) / max(asked - old[1], 1)
        rate = {k: (after[k] - before[k]) / seconds for k in RATES}
        engines = len(self.world.engines)
        busy = [now - then for now, then in zip(after["busy"], before["busy"], strict=True)]
        ttfts = [a.first - a.sent for a in self.world.answers] or [0.0]
        return Hour(
            hour=hour, requests=len(self.world.answers), hits=hits,
            value_bytes_per_second=rate["values"] * self.value_scale,
            control_bytes_per_second=rate["heard_bytes"] * self.num_frontends,
            engine_messages_per_second=rate["heard"] * self.num_frontends / engines
            + rate["tokens"] / engines,
            frontend_messages_per_second=rate["heard"] + rate["tokens"] / self.num_frontends,
            ttft_p50=percentile(ttfts, 50), ttft_p99=percentile(ttfts, 99),
            busy_mean=sum(busy) / engines / seconds, busy_most=max(busy) / seconds,
        )  # fmt: skip


def shrunk(deployment: Deployment, images: float, encoded: float, prompts: float) -> Deployment:
    """Engines that hold so many images, encoder outputs and prompts of one image, with items that
    are headers alone: contents are never read."""
    tokens = deployment.item_tokens
    value = len(msgspec.structs.replace(deployment, item_bytes=0).item())
    caches = msgspec.structs.replace(
        deployment.engine.caches,
        ipc_bytes=int(value * images),
        encoder_embeds=int(tokens * encoded),
    )
    blocks = int(prompts * (tokens + 150) / caches.block_size)
    return msgspec.structs.replace(
        deployment, engine=msgspec.structs.replace(deployment.engine, caches=caches),
        item_bytes=0, true_item_bytes=deployment.item_bytes, num_blocks=blocks,
        largest_request_bytes=8 * value,
        max_model_len=min(deployment.max_model_len, (blocks - 1) * caches.block_size),
        processor_bytes=int(20 * (value + 256)),
    )  # fmt: skip


def live(
    deployment: Deployment, costs: Costs, day: Day, *, num_frontends: int, num_engines: int,
    num_clients: int = 0, seed: int = 1, policy: Callable[[], Router] = FleetRouter,
    reports_per_second: float = PER_SECOND,
) -> list[Hour]:  # fmt: skip
    """A day of a fleet on machines of its own: every process has its cores. `reports_per_second`:
    of the load, of an engine to all its frontends."""
    own = msgspec.structs.replace(costs, client=Role(), alone_speed=costs.alone_speed)

    async def main() -> list[Hour]:
        world = World(
            deployment, own, num_frontends, num_engines, policy=policy, num_clients=num_clients
        )
        num_sessions = len(world.clients)
        for engine in world.engines.values():  # S is divided long before the last frontend comes
            receiver = engine.core.receiver
            receiver.limits = dataclasses.replace(receiver.limits, max_window_bytes=0)
            # So that each session hears as often as one of so many frontends.
            share = (num_sessions + 1) / (num_frontends + 1)
            engine.core.reports.per_second = reports_per_second * share
        listener = connect(world, "listener")
        await listener.start()
        async with world:
            fleet = Fleet(world, listener, day, seed)
            await fleet.play()
            for engine in world.engines.values():
                engine.core.check_integrity()
            assert fleet.asked == fleet.answered, "a request was lost"
        await listener.close()
        return fleet.hours

    return run(main())
