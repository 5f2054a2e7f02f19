"""The engine client against scripted engines: routing, death, drain, need, abort, membership."""

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from foveal_runtime.engine.process.integrity import digest_of
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.sequence import fan_out
from foveal_runtime.frontend.items.prepared import PreparedItem, PreparedRequest
from foveal_runtime.frontend.testing.fake_engine import ScriptedEngine, token_at
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.config import Admission, EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.errors import (
    EngineFailure,
    MediaConflict,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
    NoEngine,
    Overloaded,
    StartupError,
)
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.inprocess import InProcessHub
from foveal_runtime.wire.item import meta_of, pack_item, read_header
from foveal_runtime.wire.messages import EngineLoad
from foveal_runtime.wire.shm import SharedReader

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


class World:
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

    def make_client(self, wait_seconds: float = 5.0) -> EngineClient:
        def open_transport(endpoint: str):
            link = self.hubs[endpoint].connect(client.frontend_id)
            self.transports[endpoint] = link
            return link

        config = FrontendConfig(
            model=ModelConfig(path="/nowhere"),
            engines=tuple(EngineAddress(endpoint=e) for e in self.engines),
            admission=Admission(no_engine_wait_seconds=wait_seconds),
            drain_timeout_seconds=5.0,
        )
        client = EngineClient(config, NS, open_transport=open_transport)
        return client

    def taken(self) -> list[str]:
        return [e for e, engine in self.engines.items() for _ in engine.served]


@contextlib.asynccontextmanager
async def running(num_engines: int, wait_seconds: float = 5.0, **limits: int):
    world = World(num_engines, **limits)
    client = world.make_client(wait_seconds)
    await client.start()
    await until(lambda: client.num_ready_engines() == num_engines)
    try:
        yield world, client
    finally:
        for link in client.links():
            link.check_integrity()
        await client.close()
        for engine in world.engines.values():
            await engine.stop()


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.002)


async def collect(client: EngineClient, request: PreparedRequest) -> list[int]:
    tokens = []
    async for output in client.generate(request):
        tokens.extend(output.token_ids)
    return tokens


async def test_values_go_once_and_repeats_are_hashes():
    async with running(1) as (_, client):
        first, again = make_request("a", 1), make_request("b", 1)
        assert await collect(client, first) == expected(first)
        assert await collect(client, again) == expected(again)
        assert first.items[0].source.asked == 1
        assert again.items[0].source.asked == 0
        assert first.items[0].source.released == again.items[0].source.released == 1
        assert client.stats.mm_queries[0] == 2
        assert client.stats.mm_hits[0] == 1
        stats = client.links()[0].sender.stats
        assert stats.bytes_sent["req"] == first.items[0].size_bytes
        assert stats.bytes_avoided == first.items[0].size_bytes


async def test_requests_follow_their_items():
    async with running(3) as (world, client):
        await collect(client, make_request("a", 1))
        home = world.taken()[0]
        for index in range(4):
            await collect(client, make_request(f"b{index}", 1))
        assert world.taken() == [home] * 5


async def test_engine_death_moves_the_stream_and_nothing_is_emitted_twice():
    async with running(2) as (world, client):
        for engine in world.engines.values():
            engine.allowance = 3
        request = make_request("a", 1, 2, max_tokens=8)
        outputs = []
        stream = client.generate(request)
        for _ in range(3):
            outputs.append(await anext(stream))
        victim = next(e for e in world.engines.values() if e.served)
        other = next(e for e in world.engines.values() if e is not victim)
        other.allowance = None
        await victim.stop()
        outputs.extend([o async for o in stream])
        assert [t for o in outputs for t in o.token_ids] == expected(request)
        assert [o.first is not None for o in outputs].count(True) == 1
        assert outputs[-1].finish == "length"
        assert other.served[0].emitted == 3
        assert other.served[0].rid == ("a", 1)
        assert sum(client.stats.resubmissions.values()) == 1


async def test_drain_moves_requests_and_takes_no_new_ones():
    async with running(2) as (world, client):
        request = make_request("a", 1, max_tokens=8)
        for engine in world.engines.values():
            engine.allowance = 2
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        victim = next(e for e in world.engines.values() if e.served)
        other = next(e for e in world.engines.values() if e is not victim)
        other.allowance = None
        victim.drain()
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        await collect(client, make_request("b", 1))
        assert len(victim.served) == 1
        assert client.stats.resubmissions == {"draining": 1}


async def test_engine_restart_empties_the_mirror_and_values_go_again():
    async with running(1) as (world, client):
        engine = next(iter(world.engines.values()))
        await collect(client, make_request("a", 1))
        engine.restart()
        request = make_request("b", 1)
        assert await collect(client, request) == expected(request)
        assert request.items[0].source.asked >= 1


async def test_need_is_filled_from_the_source():
    """With no window every value is pulled; a wrong hint costs a round trip, never a failure."""
    async with running(1, max_window_bytes=0) as (_, client):
        request = make_request("a", 1, 2)
        assert await collect(client, request) == expected(request)
        assert client.links()[0].sender.stats.num_needs == 2
        assert all(item.cost.was_sent for item in request.items)
        assert client.stats.mm_hits[0] == 0


async def test_a_value_that_cannot_be_made_fails_only_its_request():
    async with running(1, max_window_bytes=0) as (_, client):
        bad, good = make_request("a", 1), make_request("b", 2)
        bad.items[0].source.error = MediaInvalid("the picture is broken")
        ends = await asyncio.gather(
            collect(client, bad), collect(client, good), return_exceptions=True
        )
        assert isinstance(ends[0], MediaInvalid)
        assert ends[1] == expected(good)
        assert bad.items[0].source.released == 1


async def test_held_only_media_goes_to_its_holder_or_fails_clearly():
    async with running(2) as (world, client):
        await collect(client, make_request("a", 1))
        home = world.taken()[0]
        request = make_request("b", 1)
        request.items[0].is_held_only = True
        await collect(client, request)
        assert world.taken() == [home, home]
        lost = make_request("c", 2)
        lost.items[0].is_held_only = True
        with pytest.raises(MediaUnknown):
            await collect(client, lost)


async def test_abort_reaches_the_engine_and_releases():
    async with running(1) as (world, client):
        engine = next(iter(world.engines.values()))
        engine.allowance = 1
        request = make_request("a", 1, max_tokens=50)
        stream = client.generate(request)
        await anext(stream)
        await stream.aclose()
        await until(lambda: engine.aborted == [("a", 0)])
        assert request.items[0].source.released == 1
        assert not client.links()[0].inflight


async def test_nothing_is_committed_when_sending_is_given_up():
    """A request that is cancelled before it was sent leaves no hint behind: lock-step drift."""
    async with running(1) as (_, client):
        request = make_request("a", 1)
        source = request.items[0].source
        source.gate.clear()
        stream = client.generate(request)
        task = asyncio.ensure_future(anext(stream))
        await until(lambda: source.asked == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stream.aclose()
        sender = client.links()[0].sender
        assert not sender.believes(request.items[0].mm_hash)
        assert sender.next_n == 1
        assert source.released == 1


async def test_no_engine_is_waited_for_then_reported():
    async with running(0, wait_seconds=0.05) as (_, client):
        with pytest.raises(NoEngine):
            await collect(client, make_request("a", 1))


async def test_a_late_engine_is_found():
    async with running(0) as (world, client):
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        world.add("tcp://late:1")
        client.set_endpoints(["tcp://late:1"])
        assert await task == expected(request)


async def test_membership_changes_let_requests_finish():
    async with running(2) as (world, client):
        for engine in world.engines.values():
            engine.allowance = 1
        request = make_request("a", 1)
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        gone = world.taken()[0]
        stays = next(e for e in world.engines if e != gone)
        client.set_endpoints([stays])
        world.engines[gone].allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert world.taken() == [gone]
        assert not client.stats.resubmissions
        world.engines[stays].allowance = None
        await collect(client, make_request("b", 1))
        assert len(world.engines[stays].served) == 1


async def test_engine_errors_become_typed():
    async with running(1) as (world, client):
        engine = next(iter(world.engines.values()))
        engine.finish_with = ("context_length_exceeded", "too long by 5")
        with pytest.raises(Exception, match="too long by 5") as caught:
            await collect(client, make_request("a", 1))
        assert caught.value.code == "context_length_exceeded"


async def test_items_larger_than_the_engine_are_refused():
    async with running(1, capacity_bytes=4096, staging_bytes=4096) as (_, client):
        with pytest.raises(MediaTooLarge):
            await collect(client, make_request("a", 1, side=64))


async def test_a_uuid_bound_elsewhere_is_a_conflict():
    async with running(1) as (_, client):
        first, second = make_request("a", 1), make_request("b", 2)
        first.binds = [(b"u" * 32, b"1" * 32)]
        second.binds = [(b"u" * 32, b"2" * 32)]
        await collect(client, first)
        await until(lambda: client.lookup_alias(b"u" * 32) == b"1" * 32)
        with pytest.raises(MediaConflict):
            await collect(client, second)


async def test_a_request_that_sees_engine_after_engine_die_ends():
    """A request that kills whatever runs it must not travel for ever."""
    async with running(1) as (world, client):
        engine = next(iter(world.engines.values()))
        engine.allowance = 0
        task = asyncio.create_task(collect(client, make_request("a", 1)))
        for attempt in range(4):
            await until(lambda n=attempt: len(engine.served) == n + 1)
            assert client.stats.resubmissions.get("unknown_session", 0) == attempt
            engine.restart()
        with pytest.raises(EngineFailure, match="4 engines died"):
            await task
        assert len(engine.served) == 4


async def test_links_that_break_again_and_again_are_no_deaths():
    """Eight cuts, twice as many as engines a request may see die."""
    async with running(2) as (world, client):
        for engine in world.engines.values():
            engine.allowance = 0
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        for cut in range(8):
            await until(lambda n=cut: len(world.taken()) == n + 1)
            home = next(link.endpoint for link in client.links() if link.inflight)
            world.transports[home].cut()
            await until(lambda n=home: not _is_up(client, n))
            world.transports[home].heal()
        for engine in world.engines.values():
            engine.allowance = None
        assert await task == expected(request)
        assert sum(client.stats.resubmissions.values()) == 8


async def test_no_fifth_engine_is_risked_before_it_shows_what_became_of_four():
    """Four engines went away with the request: it waits until one of them is back, and does not
    take the next one down as well."""
    async with running(5) as (world, client):
        for engine in world.engines.values():
            engine.allowance = 0
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        gone = []
        for loss in range(4):
            await until(lambda n=loss: len(world.taken()) == n + 1)
            gone.append(next(link.endpoint for link in client.links() if link.inflight))
            world.transports[gone[-1]].cut()
        await until(lambda: sum(client.stats.resubmissions.values()) == 4)
        [left] = world.engines.keys() - set(gone)
        assert client.num_ready_engines() == 1
        assert not world.engines[left].served
        for engine in world.engines.values():
            engine.allowance = None
        world.transports[gone[0]].heal()  # the same boot: a link broke, no engine died
        assert await task == expected(request)


async def test_engines_nobody_can_reach_for_long_are_taken_for_dead():
    async with running(4, wait_seconds=0.3) as (world, client):
        for engine in world.engines.values():
            engine.allowance = 0
        task = asyncio.create_task(collect(client, make_request("a", 1)))
        for loss in range(4):
            await until(lambda n=loss: len(world.taken()) == n + 1)
            home = next(link.endpoint for link in client.links() if link.inflight)
            world.transports[home].cut()
        with pytest.raises(EngineFailure, match="4 engines died"):
            await task


def _is_up(client: EngineClient, endpoint: str) -> bool:
    return any(link.sender.is_up for link in client.links() if link.endpoint == endpoint)


async def test_an_engine_that_says_it_drains_gets_no_new_requests():
    """It says so with its load report, long before it ends the session."""
    async with running(2) as (world, client):
        await collect(client, make_request("a", 1))
        home = world.taken()[0]
        world.engines[home].load = EngineLoad(1, 0, 0, 0, 0.0, draining=True)
        await collect(client, make_request("b", 1))  # its outputs carry the report
        await collect(client, make_request("c", 1))
        assert world.taken().count(home) == 2
        assert client.num_ready_engines() == 1
        assert not client.stats.resubmissions


async def test_sequences_of_a_request_count_its_items_once():
    """Regression: n = 3 counted three queries and two hits for one new picture."""
    async with running(1) as (_, client):
        for name, hits in (("a", 0), ("b", 1)):
            sequences = fan_out(make_request(name, 1), 3)
            tokens = await asyncio.gather(*(collect(client, one) for one in sequences))
            assert tokens == [expected(one) for one in sequences]
            assert client.stats.mm_hits[0] == hits
        assert client.stats.mm_queries[0] == 2


async def test_a_uuid_waits_for_its_holder_while_the_link_is_down():
    async with running(2) as (world, client):
        await collect(client, make_request("a", 1))
        home = world.taken()[0]
        world.transports[home].cut()
        await until(lambda: not _is_up(client, home))
        request = make_request("b", 1)
        request.items[0].is_held_only = True
        task = asyncio.create_task(collect(client, request))
        world.transports[home].heal()
        assert await task == expected(request)
        assert world.taken() == [home, home]


async def test_a_full_engine_passes_requests_on():
    """Regression: a request that the engine holding its image refused as overloaded went to the
    same engine again (it still held the most), and failed with a 503 though another was free."""
    async with running(2) as (world, client):
        await collect(client, make_request("first", 1))
        full = next(e for e in world.engines.values() if e.served)
        free = next(e for e in world.engines.values() if e is not full)
        full.finish_with = ("overloaded", "256 requests are waiting in this engine already")
        request = make_request("second", 1)
        assert await collect(client, request) == expected(request)
        assert [served.rid[0] for served in free.served] == ["second"]
        assert client.stats.resubmissions == {"overloaded": 1}
        free.finish_with = full.finish_with
        with pytest.raises(Overloaded, match="every engine's queue is full"):
            await collect(client, make_request("third", 1))


async def test_mirrors_can_be_compared_with_engines():
    """/debug/mirrors tells the same digest as the engine's directory has."""
    async with running(2) as (world, client):
        await collect(client, make_request("a", 1, 2))
        views = client.mirrors()
        assert views.keys() == world.engines.keys()
        for name, engine in world.engines.items():
            await until(lambda n=name: not client.mirrors()[n].num_optimistic)
            assert client.mirrors()[name].digest == digest_of(engine.receiver.store.announced())
            assert client.mirrors()[name].inflight_bytes == 0
        assert sum(view.num_confirmed for view in client.mirrors().values()) == 2


async def test_a_silent_engine_is_given_up():
    async with running(2) as (world, client):
        request = make_request("a", 1)
        for engine in world.engines.values():
            engine.allowance = 2
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        victim = next(e for e in world.engines.values() if e.served)
        victim.is_silent = True
        next(e for e in world.engines.values() if e is not victim).allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert client.stats.resubmissions == {"silent": 1}


async def test_many_requests_over_flapping_links_all_finish():
    async with running(3) as (world, client):
        requests = [make_request(f"r{i}", i % 5, (i * 3) % 7, max_tokens=20) for i in range(24)]
        for request in requests:
            items = {item.mm_hash: item for item in request.items}
            request.items = list(items.values())
            request.placements = [(1, 0), (2, len(request.items) - 1)]
        tasks = [asyncio.create_task(collect(client, r)) for r in requests]
        for index in range(6):
            link = world.transports[f"tcp://e{index % 3}:1"]
            link.cut()
            await asyncio.sleep(0)
            link.heal()
            await until(lambda: client.num_ready_engines() >= 2)
        ends = await asyncio.gather(*tasks)
        for request, tokens in zip(requests, ends, strict=True):
            assert tokens == expected(request)


async def test_every_address_behind_a_name_is_an_engine():
    world = World(2)
    answers = [["10.0.0.1", "10.0.0.2"]]
    world.hubs = {f"tcp://10.0.0.{i + 1}:5570": h for i, h in enumerate(world.hubs.values())}

    def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("engines.svc", 5570)
        if not answers:
            raise OSError("the name server has a bad moment")
        return answers.pop()

    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"),
        engines=(EngineAddress(endpoint="tcp://engines.svc:5570", dns=True),),
    )
    client = EngineClient(
        config, NS, resolve=resolve,
        open_transport=lambda endpoint: world.hubs[endpoint].connect(client.frontend_id),
    )  # fmt: skip
    await client.start()
    await until(lambda: client.num_ready_engines() == 2)
    request = make_request("a", 1)
    assert await collect(client, request) == expected(request)
    await client.close()
    for engine in world.engines.values():
        await engine.stop()


async def test_health_means_a_stepping_engine():
    async with running(1) as (world, client):
        engine = next(iter(world.engines.values()))
        link = client.links()[0]
        before = link.sender.next_n
        assert await client.health()
        assert link.sender.acked >= before, "an answer of the engine's core, not a flag"
        await engine.stop()
        await until(lambda: not client.links()[0].sender.is_up)
        assert not await client.health()
        assert client.links()[0].name == "tcp://e0:1"


async def test_administration_reaches_every_engine():
    async with running(2) as (_, client):
        await collect(client, make_request("a", 1))
        key = (1).to_bytes(32, "big")
        await until(lambda: client.lookup_item(key) is not None)
        assert client.control("reset_mm") == 2
        await until(lambda: client.lookup_item(key) is None)


async def test_injected_values_are_offered_and_then_believed():
    from foveal_runtime.mirror.sender import SendItem, SendValue
    from foveal_runtime.wire.codec import digest

    async with running(2) as (_, client):
        data, key = make_value(1), (1).to_bytes(32, "big")
        assert client.put([SendItem(key, len(data))], {key: SendValue(data, digest(data))}) == 1
        request = make_request("a", 1)
        await collect(client, request)
        assert request.items[0].source.asked == 0
        assert client.stats.mm_hits[0] == 1


async def test_an_engine_that_dies_while_a_value_is_made():
    """The session ended between the plan and the send: the request goes elsewhere, silently."""
    async with running(2) as (world, client):
        await collect(client, make_request("warm", 3))
        home = world.taken()[0]
        request = make_request("a", 3, 1)
        source = request.items[1].source
        source.gate.clear()
        task = asyncio.create_task(collect(client, request))
        await until(lambda: source.asked == 1)
        world.transports[home].cut()
        await until(lambda: client.num_ready_engines() == 1)
        source.gate.set()
        assert await task == expected(request)
        assert sorted(world.taken()) == sorted(world.engines)
        world.transports[home].heal()


@contextlib.asynccontextmanager
async def sharing(tmp_path, *, engine_sees: bool = True, shm_bytes: int = 1 << 20):
    """One engine on the frontend's node, values through shared memory."""
    folder = tmp_path if engine_sees else tmp_path / "elsewhere"
    hub, reader = InProcessHub(), SharedReader(folder)
    engine = ScriptedEngine(
        hub, namespace=NS, node="n1", open_shared=reader.open,
        limits=ReceiverLimits(capacity_bytes=1 << 18),
    )  # fmt: skip
    engine.start()
    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"), engines=(EngineAddress(endpoint="tcp://e0:1"),),
        node="n1", ipc_type="shm", shm_directory=str(tmp_path), shm_bytes=shm_bytes,
    )  # fmt: skip
    client = EngineClient(config, NS, open_transport=lambda _: hub.connect(client.frontend_id))
    await client.start()
    await until(lambda: client.num_ready_engines() == 1)
    try:
        yield client, engine, reader
    finally:
        client.shared.writer.check_integrity()
        await client.close()
        await engine.stop()
        assert not list((tmp_path / "mm").iterdir())


async def test_values_go_through_shared_memory(tmp_path):
    async with sharing(tmp_path) as (client, engine, reader):
        request = make_request("a", 1, side=64)
        assert await collect(client, request) == expected(request)
        assert reader.num_opened == 1
        sent = client.links()[0].sender.stats.bytes_sent
        assert sent == {"req": 0, "fill": 0, "put": 0, "shm": request.items[0].size_bytes}
        assert engine.served[0].items == {request.items[0].mm_hash: request.items[0].size_bytes}


async def test_a_file_that_cannot_be_opened_is_asked_for_inline(tmp_path):
    async with sharing(tmp_path, engine_sees=False) as (client, _, reader):
        request = make_request("a", 1, side=64)
        assert await collect(client, request) == expected(request)
        assert reader.num_absent == 1
        assert client.links()[0].sender.stats.bytes_sent["fill"] == request.items[0].size_bytes


async def test_shared_files_are_freed_when_engines_let_go(tmp_path):
    """The budget holds two files, the engine's cache five: room comes from what it evicted, and
    what finds none goes inline."""
    async with sharing(tmp_path, shm_bytes=110_000) as (client, _, _):
        for index in range(1, 16):
            request = make_request(f"r{index}", index, side=64)
            assert await collect(client, request) == expected(request)
        sent = client.links()[0].sender.stats.bytes_sent
        assert sent["req"] > 0
        assert client.shared.writer.num_written > 2


async def test_an_engine_that_opens_no_file_gets_values_inline(tmp_path):
    """Another volume under the same name must not cost a round trip for every picture."""
    async with sharing(tmp_path, engine_sees=False) as (client, engine, reader):
        for index in range(1, 8):
            request = make_request(f"r{index}", index, side=64)
            assert await collect(client, request) == expected(request)
        assert reader.num_absent == 3
        assert client.shared.fallbacks == {"no_room": 0, "write_failed": 0, "engine_blind": 4}
        engine.restart()  # a new life may have the right mount
        await until(lambda: client.links()[0].boot == 2 and client.num_ready_engines() == 1)
        request = make_request("again", 9, side=64)
        assert await collect(client, request) == expected(request)
        assert reader.num_absent == 4


async def test_an_engine_that_sees_files_may_ask_as_often_as_it_likes(tmp_path):
    """Evictions race with sends; that is no reason to give shared memory up."""
    async with sharing(tmp_path) as (client, _, reader):
        for index in range(1, 4):
            await collect(client, make_request(f"r{index}", index, side=64))
        link = client.links()[0]
        for index in range(1, 10):
            client.shared.needed(link, index.to_bytes(32, "big"))
        await collect(client, make_request("more", 11, side=64))
        assert reader.num_opened == 4
        assert client.shared.fallbacks["engine_blind"] == 0


async def test_what_does_not_fit_is_a_startup_error(tmp_path):
    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"), ipc_type="shm", shm_directory=str(tmp_path),
        shm_bytes=1 << 60,
    )  # fmt: skip
    with pytest.raises(StartupError, match="lower shm_bytes"):
        EngineClient(config, NS)
    with pytest.raises(StartupError, match="shm_directory"):
        EngineClient(msgspec.structs.replace(config, shm_directory=""), NS)
