"""Scripted engines behind in-process transports, and one engine client."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import numpy as np

from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.items.prepared import PreparedItem, PreparedRequest
from foveal_runtime.frontend.testing.fake_engine import ScriptedEngine, token_at
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.config import Admission, EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import meta_of, pack_item, read_header
from foveal_runtime.wire.testing.inprocess import InProcessHub

NS = b"n" * 16


def make_value(index: int, side: int = 16) -> bytes:
    return pack_item(
        0, (1, 2, 2, 3), ((1, 2),), {"x": ("float32", np.full((3, side, side), index, "f4"))}
    )


@dataclass
class Source:
    """A value source that counts; `error` makes it fail."""

    data: bytes
    error: Exception | None = None
    asked: int = 0
    released: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def value(self) -> bytes:
        self.asked += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.data

    def release(self) -> None:
        self.released += 1


def make_request(name: str, *indices: int, max_tokens: int = 6, side: int = 16) -> PreparedRequest:
    items = []
    for index in indices:
        data = make_value(index, side)
        key = index.to_bytes(32, "big")
        items.append(PreparedItem(key, 0, Source(data), len(data), meta_of(read_header(data))))
    return PreparedRequest(
        name, [5, *([9] * len(indices)), 7], items, [(i + 1, i) for i in range(len(indices))],
        SamplingParams(max_tokens=max_tokens),
    )  # fmt: skip


def expected(request: PreparedRequest) -> list[int]:
    return [token_at(request.token_ids, i) for i in range(request.sampling.max_tokens)]


class ScriptedEngines:
    """Engines behind in-process hubs, and one client."""

    def __init__(self, num_engines: int, **limits: int) -> None:
        self.engines: dict[str, ScriptedEngine] = {}
        self.hubs: dict[str, InProcessHub] = {}
        self.transports: dict[str, object] = {}
        self.limits = ReceiverLimits(**({"capacity_bytes": 1 << 24} | limits))
        for index in range(num_engines):
            self.add(f"tcp://e{index}:1")

    def add(self, endpoint: str) -> ScriptedEngine:
        hub = self.hubs[endpoint] = InProcessHub()
        engine = ScriptedEngine(hub, namespace=NS, engine_id=endpoint, limits=self.limits)
        self.engines[endpoint] = engine
        engine.start()
        return engine

    def make_client(self, wait_seconds: float = 5.0, drain_seconds: float = 5.0) -> EngineClient:
        def open_transport(endpoint: str):
            link = self.hubs[endpoint].connect(client.frontend_id)
            self.transports[endpoint] = link
            return link

        config = FrontendConfig(
            model=ModelConfig(path="/nowhere"),
            engines=tuple(EngineAddress(endpoint=e) for e in self.engines),
            admission=Admission(no_engine_wait_seconds=wait_seconds),
            drain_timeout_seconds=drain_seconds,
        )
        client = EngineClient(config, NS, open_transport=open_transport)
        return client

    def taken(self) -> list[str]:
        return [e for e, engine in self.engines.items() for _ in engine.served]


@contextlib.asynccontextmanager
async def running(
    num_engines: int, wait_seconds: float = 5.0, drain_seconds: float = 5.0, **limits: int
):
    scripted = ScriptedEngines(num_engines, **limits)
    client = scripted.make_client(wait_seconds, drain_seconds)
    await client.start()
    await until(lambda: client.num_ready_engines() == num_engines)
    try:
        yield scripted, client
    finally:
        for link in client.links():
            link.check_integrity()
        await client.close()
        for engine in scripted.engines.values():
            await engine.stop()


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


async def collect(client: EngineClient, request: PreparedRequest) -> list[int]:
    tokens = []
    async for output in client.generate(request):
        tokens.extend(output.token_ids)
    return tokens


def _is_up(client: EngineClient, endpoint: str) -> bool:
    return any(link.sender.is_up for link in client.links() if link.endpoint == endpoint)
