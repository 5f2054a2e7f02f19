"""One request that kills engines in a load of streams: what it costs, and that it comes once."""

import asyncio

import pytest

from foveal_runtime.frontend.engines.quarantine import Quarantine
from foveal_runtime.frontend.engines.run import EngineRun
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.plan.errors import EngineFailure, RequestQuarantined
from foveal_runtime.plan.sampling import SamplingParams
from tests.support.scripted_engines import collect, expected, make_request, running, until

POISON = 666


def poisoned(name: str) -> PreparedRequest:
    return PreparedRequest(name, [5, POISON], [], [], SamplingParams(max_tokens=4, seed=1))


async def test_a_poisonous_request_in_a_load_of_streams():
    """It took up to four engines down, and the innocent of its batches were charged with the same
    deaths: all of them failed together."""
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.poison = POISON
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

        assert client.quarantine.clear() == 1
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
    monkeypatch.setattr("foveal_runtime.frontend.engines.quarantine.MAX_HELD", 2)
    for number in range(5):
        quarantine.convict(
            EngineRun(PreparedRequest("d", [number], [], [], SamplingParams(max_tokens=4)))
        )
    assert len(quarantine) == 2
