"""One request that kills engines in a load of streams: what it costs, and that it comes once."""

import asyncio
import time

import pytest

from foveal_runtime.frontend.engines.quarantine import Quarantine
from foveal_runtime.frontend.engines.run import EngineRun
from foveal_runtime.frontend.http.monitoring.metrics_source import media_source
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.mirror.messages import Death, Refusals
from foveal_runtime.plan.errors import EngineFailure, RequestQuarantined
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.telemetry.metrics import Metrics
from tests.support.scripted_engines import collect, expected, make_request, running, until

POISON = 666


def poisoned(name: str) -> PreparedRequest:
    return PreparedRequest(name, [5, POISON], [], [], SamplingParams(max_tokens=4, seed=1))


async def start_load(scripted, client):
    """64 streams in the middle of their answers, and how many engine lives were lost since."""
    for engine in scripted.engines.values():
        engine.poison = POISON
        engine.allowance = 32 * 3
    innocent = [make_request(f"r{i}", i, max_tokens=12) for i in range(64)]
    streams = [asyncio.create_task(collect(client, request)) for request in innocent]
    await until(lambda: sum(s.outputs for e in scripted.engines.values() for s in e.served) == 192)
    lives = {name: engine._boot for name, engine in scripted.engines.items()}
    return (
        innocent,
        streams,
        lambda: sum(engine._boot - lives[name] for name, engine in scripted.engines.items()),
    )


async def test_a_poisonous_request_costs_one_life_and_no_stream():
    """It took two engines down before it was refused, and other frontends learnt nothing of it."""
    async with running(2) as (scripted, client):
        other = scripted.make_client()
        await other.start()
        await until(lambda: other.num_ready_engines() == 2)
        innocent, streams, deaths = await start_load(scripted, client)
        with pytest.raises(EngineFailure, match="the only one that was new"):
            await collect(client, poisoned("bad"))
        assert deaths() == 1
        for engine in scripted.engines.values():
            engine.allowance = None
        assert await asyncio.gather(*streams) == [expected(request) for request in innocent]
        assert deaths() == 1
        [held] = client.quarantine.held()
        assert held.shape == "2 prompt tokens, max_tokens 4"

        await until(lambda: len(other.quarantine))
        for one in (client, other):
            with pytest.raises(RequestQuarantined, match="is refused for another"):
                await collect(one, poisoned("again"))
        assert deaths() == 1
        assert await other.clear_quarantine() == 2
        await until(lambda: not len(client.quarantine))
        with pytest.raises(EngineFailure):
            await collect(client, poisoned("cleared"))
        assert deaths() == 2
        await other.close()


async def test_who_hears_of_a_conviction_may_ask_a_frontend_that_has_not(monkeypatch):
    """It knew of it a moment later, and lost a second engine to the same request."""
    async with running(2) as (scripted, client):
        other = scripted.make_client()
        await other.start()
        await until(lambda: other.num_ready_engines() == 2)
        for engine in scripted.engines.values():
            engine.poison, engine.is_silent = POISON, True
        killer = asyncio.create_task(collect(client, poisoned("bad")))
        await until(lambda: any(link.inflight for link in client.links()))
        [endpoint] = [link.endpoint for link in client.links() if link.inflight]
        scripted.engines[endpoint].is_silent = False
        await until(lambda: client.quarantine.num_convicted)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not killer.done(), "the other engine has not read of it"
        for engine in scripted.engines.values():
            engine.is_silent = False
        with pytest.raises(EngineFailure, match="the only one that was new"):
            await killer
        monkeypatch.setattr(other.quarantine, "check", lambda run: None)  # it has not heard
        with pytest.raises(RequestQuarantined, match="is refused for another"):
            await collect(other, poisoned("again"))
        assert sorted(engine._boot for engine in scripted.engines.values()) == [1, 2]
        await other.close()


async def test_the_quarantine_is_in_the_metrics(start_input):
    made = await start_input()
    async with running(1) as (_, client):
        metrics = Metrics("frontend", model_name="m", process="frontend-0")
        metrics.add_source(media_source(client.stats, made, client))
        convicted, held = "foveal_requests_quarantined_total", "foveal_quarantine_entries"

        def shown() -> dict[str, str]:
            samples = (line.rsplit(" ", 1) for line in metrics.exposition().decode().splitlines())
            values = {name.split("{")[0]: value for name, value in samples}
            return {name: values[name] for name in (convicted, held)}

        assert shown() == {convicted: "0.0", held: "0.0"}
        client.quarantine.convict(EngineRun(poisoned("bad")))
        assert shown() == {convicted: "1.0", held: "1.0"}
        await client.clear_quarantine()
        assert shown() == {convicted: "1.0", held: "0.0"}


async def test_suspects_of_one_step_are_tried_alone():
    """Two requests were new in the fatal step: the innocent one is answered, and the other is
    convicted by its second engine, whoever else is new there."""
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.poison = POISON
        first, other = scripted.engines.values()
        first.is_silent = True
        link = next(link for link in client.links() if scripted.engines[link.endpoint] is first)
        second = make_request("good", 3, max_tokens=8)
        tasks = [asyncio.create_task(collect(client, one)) for one in (poisoned("bad"), second)]
        tasks.append(asyncio.create_task(collect(client, make_request("fine", 4))))
        await until(lambda: link.inflight + len(other.served) >= 3)
        first.is_silent = False
        with pytest.raises(EngineFailure):
            await tasks[0]
        assert await tasks[1] == expected(second)
        await tasks[2]
        assert client.quarantine.num_convicted == 1


async def test_a_poisonous_request_where_no_evidence_comes():
    """It took up to four engines down, and the innocent of its batches were charged with the same
    deaths: all of them failed together."""
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.poison = POISON
            engine.tells = False
            engine.allowance = 40
        innocent = [make_request(f"r{i}", i, max_tokens=12) for i in range(32)]
        streams = [asyncio.create_task(collect(client, request)) for request in innocent]
        await until(lambda: len(scripted.taken()) == 32)
        killer = asyncio.create_task(collect(client, poisoned("bad")))
        lives = {name: engine._boot for name, engine in scripted.engines.items()}

        def deaths() -> int:
            return sum(e._boot - lives[name] for name, e in scripted.engines.items())

        await until(lambda: deaths() == 1)
        for engine in scripted.engines.values():
            engine.allowance = None
        with pytest.raises(EngineFailure, match="2 engines died"):
            await killer
        assert await asyncio.gather(*streams) == [expected(request) for request in innocent]
        assert deaths() == 2
        assert client.quarantine.num_convicted == 1

        with pytest.raises(RequestQuarantined, match="is refused for another"):
            await collect(client, poisoned("again"))
        assert deaths() == 2
        request = make_request("other", 99)
        assert await collect(client, request) == expected(request)

        assert len(client.quarantine) == 1
        assert await client.clear_quarantine() == 2
        with pytest.raises(EngineFailure):
            await collect(client, poisoned("cleared"))
        assert deaths() == 4


def test_the_quarantine_ends_and_is_bounded(monkeypatch):
    now = [0.0]
    quarantine = Quarantine(seconds=10.0, clock=lambda: now[0])
    run = EngineRun(poisoned("a"))
    other_seed = EngineRun(
        PreparedRequest("b", [5, POISON], [], [], SamplingParams(max_tokens=4, seed=2))
    )
    other_tokens = EngineRun(
        PreparedRequest("c", [5, 6], [], [], SamplingParams(max_tokens=4, seed=1))
    )
    quarantine.convict(run)
    with pytest.raises(RequestQuarantined):
        quarantine.check(other_seed)
    quarantine.check(other_tokens)
    now[0] = 10.0
    quarantine.check(run)
    assert len(quarantine) == 0
    monkeypatch.setattr("foveal_runtime.mirror.refusals.MAX_REFUSALS", 2)
    for number in range(5):
        quarantine.convict(
            EngineRun(PreparedRequest("d", [number], [], [], SamplingParams(max_tokens=4)))
        )
    assert len(quarantine) == 2


def test_clocks_of_others_that_are_ahead_neither_lengthen_nor_keep_a_refusal():
    quarantine = Quarantine(seconds=10.0, clock=lambda: 4.0)
    quarantine.on_death(("e", 1), Death(1, 100.0, (b"told",), is_own=True))
    quarantine.book.join(Refusals(entries=((b"shared", 2.0, ""),)))
    assert {held.key: held.seconds_left for held in quarantine.held()} == {
        b"told": 10.0, b"shared": 8.0,
    }  # fmt: skip
    quarantine.book.join(Refusals(entries=((b"ahead", 90.0, ""),)))
    assert quarantine.clear() == 3
    assert not quarantine.held()


def test_an_engine_that_nobody_reaches_is_dead_once_a_turn_is_over():
    quarantine, run, now = Quarantine(turn_seconds=30.0), EngineRun(poisoned("a")), time.monotonic()
    fates = [
        quarantine.fate_of(run, ("e", 1), now - seconds, None, may_tell=False)
        for seconds in (0, 25, 31)
    ]
    assert fates == ["unknown", "unknown", "dead"]


async def test_the_wait_after_a_second_loss_is_no_busy_loop(monkeypatch):
    """Evidence was awaited from one engine, and the limit had long passed for the other."""
    async with running(1) as (scripted, client):
        run, asked = EngineRun(poisoned("a")), []
        [endpoint] = scripted.engines
        now = time.monotonic()
        run.suspects = {("gone", 1): now - client.quarantine.evidence_seconds, (endpoint, 9): now}
        run.awaiting = {(endpoint, 9)}

        def settle(fate_of):
            asked.append(fate_of)
            return False

        monkeypatch.setattr(run, "settle", settle)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client._let_it_show(run)
        assert len(asked) < 20
