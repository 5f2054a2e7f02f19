"""Routing against round robin and hash affinity: seeded, simulated time, real router and mirrors.

    PYTHONPATH=runtime/src python e2e/bench/simulation/routing.py [--requests 1500] [--seed 1]

Three frontends and four engines. Router, Sender and Receiver are the product's; an engine is a
queue with one server whose service time is a constant plus what each image costs that is not there
(sending its value, encoding it). Notes and load reports reach frontends every 50 ms, as on the
wire. A row is the same trace of requests under one policy: what is compared is hits, bytes sent and
latency. The absolute milliseconds mean nothing.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from blake3 import blake3

from foveal_runtime.frontend.engines.routing import Candidate, Router, affinity_keys, estimate_load
from foveal_runtime.mirror.messages import InlineValue, Req
from foveal_runtime.mirror.receiver import Receiver
from foveal_runtime.mirror.records import ReceiverLimits
from foveal_runtime.mirror.sender import Sender, Sending, SendItem, SendValue
from foveal_runtime.mirror.store import Value

NUM_FRONTENDS, NUM_ENGINES = 3, 4
ITEM_BYTES = 64  # of the simulated value; it stands for REAL_BYTES
REAL_BYTES = 2_000_000
CACHE_ITEMS = 64  # per engine, in the value pool and in the encoder cache
BASE, SEND, ENCODE = 0.040, 0.015, 0.120  # seconds: answering; per missing value; per encoding
TICK = 0.050
BODY = msgspec.Raw(b"\xc0")


class Trace(NamedTuple):
    """One request: when, through which frontend, prompt tokens, images."""

    at: float
    frontend: int
    tokens: list[int]
    images: list[int]


def key_of(image: int) -> bytes:
    return blake3(f"image {image}".encode()).digest()


class Engine:
    """A real receiver in front of a queue with one server."""

    def __init__(self, name: str) -> None:
        size = CACHE_ITEMS * ITEM_BYTES
        self.name = name
        self.receiver = Receiver(
            ReceiverLimits(capacity_bytes=size, staging_bytes=4 * size, grace_bytes=0)
        )
        self.encoded: OrderedDict[bytes, None] = OrderedDict()
        self.queue: deque[tuple[str, tuple[str, int], int, list[bytes]]] = deque()
        self.current: tuple[str, tuple[str, int]] | None = None
        self.hits = self.queries = 0

    @property
    def load(self) -> int:
        return len(self.queue) + (self.current is not None)

    def take_ready(self) -> None:
        for ready in self.receiver.take_ready():
            missing = len(ready.items) - ready.num_hits
            self.queue.append((ready.fid, ready.rid, missing, list(ready.items)))

    def start(self) -> float:
        """Begins the next request; returns its service time."""
        fid, rid, missing, keys = self.queue.popleft()
        self.current = (fid, rid)
        seconds = BASE + SEND * missing
        for key in keys:
            self.queries += 1
            if key in self.encoded:
                self.hits += 1
                self.encoded.move_to_end(key)
                continue
            seconds += ENCODE
            self.encoded[key] = None
            while len(self.encoded) > CACHE_ITEMS:
                self.encoded.popitem(last=False)
        return seconds


class Frontend:
    """Real senders, one an engine, and a real router."""

    def __init__(self, name: str, engines: list[Engine]) -> None:
        self.name = name
        self.router = Router()
        self.senders = {e.name: Sender(name, frontend_boot=1) for e in engines}
        self.own = dict.fromkeys(self.senders, 0)
        self.reported = dict.fromkeys(self.senders, (0, 0))  # load, own at the report
        self.bytes_sent = 0
        self.num_sent = 0

    def candidates(self, keys: list[bytes]) -> list[Candidate]:
        found = []
        for name, sender in self.senders.items():
            held = sum(REAL_BYTES for key in keys if sender.believes(key))
            load = estimate_load(self.own[name], *self.reported[name], age_seconds=0.0)
            found.append(Candidate(name, load, held))
        return found


Policy = Callable[[Frontend, list[bytes], list[bytes]], str]


def foveal(frontend: Frontend, keys: list[bytes], affinity: list[bytes]) -> str:
    senders = frontend.senders.values()
    new = [key for key in keys if not any(sender.believes(key) for sender in senders)]
    name = frontend.router.choose(frontend.candidates(keys), affinity, max(new, default=b""))
    assert name is not None
    frontend.router.commit(name, affinity)
    return name


def round_robin(frontend: Frontend, keys: list[bytes], affinity: list[bytes]) -> str:
    return list(frontend.senders)[frontend.num_sent % NUM_ENGINES]


def hash_affinity(frontend: Frontend, keys: list[bytes], affinity: list[bytes]) -> str:
    first = keys[0] if keys else affinity[-1]
    return list(frontend.senders)[int.from_bytes(first[:8], "big") % NUM_ENGINES]


POLICIES: dict[str, Policy] = {
    "foveal": foveal, "round robin": round_robin, "hash affinity": hash_affinity,
}  # fmt: skip


class World:
    """One run of one trace under one policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.engines = {f"engine-{i}": Engine(f"engine-{i}") for i in range(NUM_ENGINES)}
        engines = list(self.engines.values())
        self.frontends = {f"f{i}": Frontend(f"f{i}", engines) for i in range(NUM_FRONTENDS)}
        self.events: list[tuple[float, int, str, object]] = []
        self.serial = 0
        self.began: dict[tuple[str, int], float] = {}
        self.latencies: list[float] = []
        self.now = 0.0
        for frontend in self.frontends.values():
            for name, sender in frontend.senders.items():
                self.up(frontend, name, sender.hello())

    def push(self, at: float, kind: str, what: object) -> None:
        self.serial += 1
        heapq.heappush(self.events, (at, self.serial, kind, what))

    def up(self, frontend: Frontend, name: str, sending: Sending) -> None:
        """A message to an engine, and whatever is said at once in answer."""
        engine, message = self.engines[name], sending.message
        values = {}
        if isinstance(message, Req):
            carried = [i for i in message.items if isinstance(i.value, InlineValue)]
            values = {i.mm_hash: Value(bytes(ITEM_BYTES)) for i in carried}
        elif sending.frames:  # a fill
            values = {message.mm_hash: Value(bytes(ITEM_BYTES))}  # type: ignore[union-attr]
        frontend.bytes_sent += len(values) * REAL_BYTES
        for answer in engine.receiver.on_message(frontend.name, message, values):
            frontend.senders[name].on_down(answer)
        if engine.receiver.wants_immediate_flush(frontend.name):
            self.down(frontend, name)
        engine.take_ready()
        self.serve(engine)

    def down(self, frontend: Frontend, name: str) -> None:
        note = self.engines[name].receiver.down(frontend.name)
        if note is None:
            return
        sender = frontend.senders[name]
        for key in sender.on_down(note).needs:
            fill = sender.fill(key, SendValue(bytes(ITEM_BYTES), b""))
            if fill is not None:
                self.up(frontend, name, fill)

    def serve(self, engine: Engine) -> None:
        if engine.current is None and engine.queue:
            self.push(self.now + engine.start(), "done", engine)

    def on_request(self, number: int, trace: Trace) -> None:
        frontend = self.frontends[f"f{trace.frontend}"]
        keys = list(dict.fromkeys(key_of(image) for image in trace.images))
        affinity = affinity_keys(trace.tokens, keys)
        name = self.policy(frontend, keys, affinity)
        frontend.num_sent += 1
        rid = (f"r{number}", 0)
        self.began[rid] = self.now
        frontend.own[name] += 1
        items = [SendItem(key, ITEM_BYTES) for key in keys]
        values = {key: SendValue(bytes(ITEM_BYTES), b"") for key in keys}
        self.up(frontend, name, frontend.senders[name].request(rid, items, BODY, values))

    def on_done(self, engine: Engine) -> None:
        assert engine.current is not None
        fid, rid = engine.current
        engine.current = None
        engine.receiver.finish(fid, rid)
        frontend = self.frontends[fid]
        frontend.senders[engine.name].finished(rid)
        frontend.own[engine.name] -= 1
        self.latencies.append(self.now - self.began.pop(rid))
        engine.take_ready()
        self.serve(engine)

    def on_tick(self) -> None:
        for frontend in self.frontends.values():
            for name, engine in self.engines.items():
                self.down(frontend, name)
                frontend.reported[name] = (engine.load, frontend.own[name])
        if self.began or self.events:
            self.push(self.now + TICK, "tick", None)

    def run(self, traces: list[Trace]) -> None:
        for number, trace in enumerate(traces):
            self.push(trace.at, "request", (number, trace))
        self.push(TICK, "tick", None)
        while self.events:
            self.now, _, kind, what = heapq.heappop(self.events)
            if kind == "request":
                self.on_request(*what)  # type: ignore[misc]
            elif kind == "done":
                assert isinstance(what, Engine)
                self.on_done(what)
            else:
                self.on_tick()
        assert len(self.latencies) == len(traces)


def draw(case: str, rng: random.Random, number: int, weights: list[float]) -> list[int]:
    if case == "popular":  # 200 images, few of them often: together they fit four engines, not one
        return [rng.choices(range(200), weights)[0]]
    if case == "pairs":
        return rng.choices(range(200), weights, k=2)
    if case == "viral":  # nearly everybody asks about one image
        return [0 if rng.random() < 0.9 else 1000 + number]
    return [1000 + number]  # "never again"


def make_trace(case: str, load: float, num_requests: int, seed: int) -> list[Trace]:
    """`load` 1.0: as many requests as the engines answer when nothing is ever there."""
    rng = random.Random(f"{seed}/{case}/{load}")
    weights = [1 / (rank + 1) ** 0.8 for rank in range(200)]
    per_request = BASE + (SEND + ENCODE) * (2 if case == "pairs" else 1)
    rate = load * NUM_ENGINES / per_request
    at, traces = 0.0, []
    for number in range(num_requests):
        at += rng.expovariate(rate)
        images = draw(case, rng, number, weights)
        tokens = [1, 2, 3] * 11 + [rng.randrange(30_000) for _ in range(20)]
        traces.append(Trace(at, rng.randrange(NUM_FRONTENDS), tokens, images))
    return traces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"seed {args.seed}, {args.requests} requests a row\n")
    print("| images | load | policy | encoder hits | MB sent a request | mean ms | p95 ms |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for case in ("popular", "pairs", "viral", "never again"):
        for load in (0.4, 1.5):
            traces = make_trace(case, load, args.requests, args.seed)
            for name, policy in POLICIES.items():
                world = World(policy)
                world.run(traces)
                engines = world.engines.values()
                hits = sum(e.hits for e in engines) / max(sum(e.queries for e in engines), 1)
                sent = sum(f.bytes_sent for f in world.frontends.values()) / len(traces) / 1e6
                p95 = statistics.quantiles(world.latencies, n=20)[18]
                mean = statistics.mean(world.latencies)
                print(f"| {case} | {load} | {name} | {hits:.0%} | {sent:.2f} | "
                      f"{mean * 1e3:.0f} | {p95 * 1e3:.0f} |")  # fmt: skip
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
