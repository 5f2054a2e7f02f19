"""Engines that die, drain, restart, fall silent or lose their link while requests run."""

import asyncio
import time

import pytest

from foveal_runtime.frontend.engines.link import DEAD_AFTER_SECONDS
from foveal_runtime.mirror import receiver
from foveal_runtime.mirror.messages import PROTOCOL_VERSION
from foveal_runtime.plan.errors import (
    EngineFailure,
    Overloaded,
)
from foveal_runtime.wire.messages import EngineLoad
from tests.support.scripted_engines import _is_up, collect, expected, make_request, running, until


async def test_engine_death_moves_the_stream_and_nothing_is_emitted_twice():
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 3
        request = make_request("a", 1, 2, max_tokens=8)
        outputs = []
        stream = client.generate(request)
        for _ in range(3):
            outputs.append(await anext(stream))
        victim = next(e for e in scripted.engines.values() if e.served)
        other = next(e for e in scripted.engines.values() if e is not victim)
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
    async with running(2) as (scripted, client):
        request = make_request("a", 1, max_tokens=8)
        for engine in scripted.engines.values():
            engine.allowance = 2
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        victim = next(e for e in scripted.engines.values() if e.served)
        other = next(e for e in scripted.engines.values() if e is not victim)
        other.allowance = None
        victim.drain()
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        await collect(client, make_request("b", 1))
        assert len(victim.served) == 1
        assert client.stats.resubmissions == {"draining": 1}


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("version_mismatch", "another version of the protocol"),
        ("ns_mismatch", "files of the model"),
    ],
)
async def test_the_log_says_what_to_do_with_an_engine_that_does_not_fit(
    reason, says, caplog, monkeypatch
):
    """A tag that was moved, or files of a claim that were replaced, while pods ran."""
    async with running(1) as (scripted, client):
        [engine], [link] = scripted.engines.values(), client.links()
        if reason == "ns_mismatch":
            engine.namespace = b"o" * 16
        else:
            monkeypatch.setattr(receiver, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        engine.restart()
        await until(lambda: link.last_end == reason)
        assert client.num_ready_engines() == 0
    [line] = [one.getMessage() for one in caplog.records if reason in one.getMessage()]
    assert "incompatible: " in line
    assert says in line
    assert "start frontends and engines again" in line


async def test_engine_restart_empties_the_mirror_and_values_go_again():
    async with running(1) as (scripted, client):
        engine = next(iter(scripted.engines.values()))
        await collect(client, make_request("a", 1))
        engine.restart()
        request = make_request("b", 1)
        assert await collect(client, request) == expected(request)
        assert request.items[0].source.asked >= 1


async def test_a_request_that_sees_engine_after_engine_die_ends():
    """A request that kills whatever runs it must not travel for ever."""
    async with running(1) as (scripted, client):
        engine = next(iter(scripted.engines.values()))
        engine.allowance = 0
        task = asyncio.create_task(collect(client, make_request("a", 1)))
        for attempt in range(2):
            await until(lambda n=attempt: len(engine.served) == n + 1)
            assert client.stats.resubmissions.get("unknown_session", 0) == attempt
            engine.restart()
        with pytest.raises(EngineFailure, match="2 engines died"):
            await task
        assert len(engine.served) == 2


async def test_links_that_break_again_and_again_are_no_deaths():
    """Eight cuts, four times as many as engines a request may see die."""
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 0
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        for cut in range(8):
            await until(lambda n=cut: len(scripted.taken()) == n + 1)
            home = next(link.endpoint for link in client.links() if link.inflight)
            scripted.transports[home].cut()
            await until(lambda n=home: not _is_up(client, n))
            scripted.transports[home].heal()
        for engine in scripted.engines.values():
            engine.allowance = None
        assert await task == expected(request)
        assert sum(client.stats.resubmissions.values()) == 8


async def test_no_third_engine_is_risked_before_it_shows_what_became_of_two():
    """Two engines went away with the request: it waits until one of them is back, and does not
    take the next one down as well."""
    async with running(3) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 0
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        gone = []
        for loss in range(2):
            await until(lambda n=loss: len(scripted.taken()) == n + 1)
            gone.append(next(link.endpoint for link in client.links() if link.inflight))
            scripted.transports[gone[-1]].cut()
        await until(lambda: sum(client.stats.resubmissions.values()) == 2)
        [left] = scripted.engines.keys() - set(gone)
        assert client.num_ready_engines() == 1
        assert not scripted.engines[left].served
        for engine in scripted.engines.values():
            engine.allowance = None
        scripted.transports[gone[0]].heal()  # the same boot: a link broke, no engine died
        assert await task == expected(request)


async def test_engines_nobody_can_reach_for_long_are_taken_for_dead():
    async with running(2, wait_seconds=0.3) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 0
        task = asyncio.create_task(collect(client, make_request("a", 1)))
        for loss in range(2):
            await until(lambda n=loss: len(scripted.taken()) == n + 1)
            home = next(link.endpoint for link in client.links() if link.inflight)
            scripted.transports[home].cut()
        with pytest.raises(EngineFailure, match="2 engines died"):
            await task


async def test_an_engine_that_says_it_drains_gets_no_new_requests():
    """It says so with its load report, long before it ends the session."""
    async with running(2) as (scripted, client):
        await collect(client, make_request("a", 1))
        home = scripted.taken()[0]
        scripted.engines[home].load = EngineLoad(1, 0, 0, 0.0, draining=True)
        await collect(client, make_request("b", 1))  # its outputs carry the report
        await collect(client, make_request("c", 1))
        assert scripted.taken().count(home) == 2
        assert client.num_ready_engines() == 1
        assert not client.stats.resubmissions


async def test_load_is_every_engines_queue_and_the_fullest_ones_cache():
    """What endpoint pickers read of a frontend's pod."""
    async with running(2) as (scripted, client):
        for number, engine in enumerate(scripted.engines.values(), 1):
            engine.load = EngineLoad(1, number, 2 * number, number / 4)
        for index in range(8):
            await collect(client, make_request(f"r{index}", index))
        assert set(scripted.taken()) == set(scripted.engines), "both have reported"
        load = client.load()
        assert (load.num_running, load.num_waiting, load.kv_usage) == (3, 6, 0.5)


async def test_a_uuid_waits_for_its_holder_while_the_link_is_down():
    async with running(2) as (scripted, client):
        await collect(client, make_request("a", 1))
        home = scripted.taken()[0]
        scripted.transports[home].cut()
        await until(lambda: not _is_up(client, home))
        request = make_request("b", 1)
        request.items[0].is_held_only = True
        task = asyncio.create_task(collect(client, request))
        scripted.transports[home].heal()
        assert await task == expected(request)
        assert scripted.taken() == [home, home]


async def test_a_full_engine_passes_requests_on():
    """Regression: a request that the engine holding its image refused as overloaded went to the
    same engine again (it still held the most), and failed with a 503 though another was free."""
    async with running(2) as (scripted, client):
        await collect(client, make_request("first", 1))
        full = next(e for e in scripted.engines.values() if e.served)
        free = next(e for e in scripted.engines.values() if e is not full)
        full.finish_with = ("overloaded", "256 requests are waiting in this engine already")
        request = make_request("second", 1)
        assert await collect(client, request) == expected(request)
        assert [served.rid[0] for served in free.served] == ["second"]
        assert client.stats.resubmissions == {"overloaded": 1}
        free.finish_with = full.finish_with
        with pytest.raises(Overloaded, match="every engine's queue is full"):
            await collect(client, make_request("third", 1))


async def test_a_silent_engine_is_given_up():
    async with running(2) as (scripted, client):
        request = make_request("a", 1)
        for engine in scripted.engines.values():
            engine.allowance = 2
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        victim = next(e for e in scripted.engines.values() if e.served)
        victim.is_silent = True
        next(e for e in scripted.engines.values() if e is not victim).allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert client.stats.resubmissions == {"silent": 1}


async def test_a_busy_event_loop_is_no_silent_engine():
    """A loop that was held up for longer than an engine may be silent ended every session of the
    process, although it had only not read what the engines had said."""
    async with running(2) as (world, client):
        request = make_request("a", 1)
        for engine in world.engines.values():
            engine.allowance = 2
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        time.sleep(DEAD_AFTER_SECONDS + 0.6)  # noqa: ASYNC251 - the loop itself is held up
        await asyncio.sleep(1.2)
        for engine in world.engines.values():
            engine.allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert client.stats.resubmissions == {}


async def test_many_requests_over_flapping_links_all_finish():
    async with running(3) as (scripted, client):
        requests = [make_request(f"r{i}", i % 5, (i * 3) % 7, max_tokens=20) for i in range(24)]
        for request in requests:
            items = {item.mm_hash: item for item in request.items}
            request.items = list(items.values())
            request.placements = [(1, 0), (2, len(request.items) - 1)]
        tasks = [asyncio.create_task(collect(client, r)) for r in requests]
        for index in range(6):
            link = scripted.transports[f"tcp://e{index % 3}:1"]
            link.cut()
            await asyncio.sleep(0)
            link.heal()
            await until(lambda: client.num_ready_engines() >= 2)
        ends = await asyncio.gather(*tasks)
        for request, tokens in zip(requests, ends, strict=True):
            assert tokens == expected(request)
        assert sum(client.stats.resubmissions.values()) > 0


async def test_an_engine_that_dies_while_a_value_is_made():
    """The session ended between the plan and the send: the request goes elsewhere, silently."""
    async with running(2) as (scripted, client):
        await collect(client, make_request("warm", 3))
        home = scripted.taken()[0]
        request = make_request("a", 3, 1)
        source = request.items[1].source
        source.gate.clear()
        task = asyncio.create_task(collect(client, request))
        await until(lambda: source.asked == 1)
        scripted.transports[home].cut()
        await until(lambda: client.num_ready_engines() == 1)
        source.gate.set()
        assert await task == expected(request)
        assert sorted(scripted.taken()) == sorted(scripted.engines)
        scripted.transports[home].heal()
