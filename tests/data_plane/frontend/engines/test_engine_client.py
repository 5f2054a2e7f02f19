"""The engine client against scripted engines: routing, values, abort, membership."""

import asyncio

import msgspec
import pytest

from foveal_runtime.engine.process.health import digest_of
from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.engines.sequence import fan_out
from foveal_runtime.frontend.http.monitoring.metrics_source import media_source
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.errors import (
    MediaConflict,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
    NoEngine,
)
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.wire.messages import EngineOutput
from tests.support.scripted_engines import (
    NS,
    ScriptedEngines,
    collect,
    expected,
    make_request,
    make_value,
    running,
    until,
)


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
    async with running(3) as (scripted, client):
        await collect(client, make_request("a", 1))
        home = scripted.taken()[0]
        for index in range(4):
            await collect(client, make_request(f"b{index}", 1))
        assert scripted.taken() == [home] * 5


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
    async with running(2, wait_seconds=0.5) as (scripted, client):
        await collect(client, make_request("a", 1))
        home = scripted.taken()[0]
        request = make_request("b", 1)
        request.items[0].is_held_only = True
        await collect(client, request)
        assert scripted.taken() == [home, home]
        lost = make_request("c", 2)
        lost.items[0].is_held_only = True
        with pytest.raises(MediaUnknown):
            await collect(client, lost)
        scripted.transports[home].cut()
        await until(lambda: client.num_ready_engines() == 1)
        with pytest.raises(MediaUnknown, match="send it again"):  # its holder may be back: not yet
            await collect(client, request)


async def test_abort_reaches_the_engine_and_releases():
    async with running(1) as (scripted, client):
        engine = next(iter(scripted.engines.values()))
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
        with pytest.raises(NoEngine, match=r"no engine was ready within 0\.05 s$"):
            await collect(client, make_request("a", 1))


async def test_an_engine_without_the_grammar_library_is_never_sent_a_grammar():
    """An older engine would leave the grammar out, and its answer would follow none."""
    async with running(1, wait_seconds=0.2) as (scripted, client):
        assert await collect(client, make_request("a", 1))
        bound = make_request("b", 1)
        bound.sampling = msgspec.structs.replace(bound.sampling, grammar="start: /a*/")
        with pytest.raises(NoEngine, match="another version, which do not know"):
            await collect(client, bound)
        assert len(scripted.taken()) == 1


async def test_a_late_engine_is_found():
    async with running(0) as (scripted, client):
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        scripted.add("tcp://late:1")
        client.set_endpoints(["tcp://late:1"])
        assert await task == expected(request)


async def test_membership_changes_let_requests_finish():
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 1
        request = make_request("a", 1)
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        gone = scripted.taken()[0]
        stays = next(e for e in scripted.engines if e != gone)
        client.set_endpoints([stays])
        scripted.engines[gone].allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert scripted.taken() == [gone]
        assert not client.stats.resubmissions
        scripted.engines[stays].allowance = None
        await collect(client, make_request("b", 1))
        assert len(scripted.engines[stays].served) == 1


async def test_an_engine_that_is_back_before_it_finished_keeps_its_streams():
    """A name server left it out once: a second link of the same name broke all streams of the
    first, and the engine took no request before that one had ended."""
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 1
        request = make_request("a", 1)
        stream = client.generate(request)
        tokens = list((await anext(stream)).token_ids)
        [link] = [link for link in client.links() if link.inflight]
        [stays] = [endpoint for endpoint in scripted.engines if endpoint != link.endpoint]
        for _ in range(2):
            client.set_endpoints([stays])
            await asyncio.sleep(0)
            client.set_endpoints([stays, link.endpoint])
        assert link in client.links()
        assert client.num_ready_engines() == 2
        scripted.engines[link.endpoint].allowance = None
        async for output in stream:
            tokens.extend(output.token_ids)
        assert tokens == expected(request)
        assert scripted.taken() == [link.endpoint]
        await asyncio.sleep(0.01)
        assert link.is_ready, "it was left before, and is idle"
        client.set_endpoints([stays])
        await until(lambda: not link.sender.is_up)
        client.set_endpoints([stays, link.endpoint])
        await until(lambda: client.num_ready_engines() == 2)


async def test_an_engine_that_left_and_never_finishes_is_given_up():
    async with running(2, drain_seconds=0.05) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 2
        request = make_request("a", 1)
        task = asyncio.create_task(collect(client, request))
        await until(lambda: scripted.taken())
        [gone] = scripted.taken()
        [stays] = [endpoint for endpoint in scripted.engines if endpoint != gone]
        scripted.engines[stays].allowance = None
        client.set_endpoints([stays])
        assert await task == expected(request)
        assert scripted.taken() == sorted([gone, stays])
        assert sum(client.stats.resubmissions.values()) == 1
        assert [link.endpoint for link in client.links()] == [stays]


async def test_engine_errors_become_typed():
    async with running(1) as (scripted, client):
        engine = next(iter(scripted.engines.values()))
        engine.finish_with = ("context_length_exceeded", "too long by 5")
        with pytest.raises(Exception, match="too long by 5") as caught:
            await collect(client, make_request("a", 1))
        assert caught.value.code == "context_length_exceeded"


async def test_items_larger_than_the_engine_are_refused():
    async with running(1, capacity_bytes=4096, staging_bytes=4096) as (_, client):
        with pytest.raises(MediaTooLarge):
            await collect(client, make_request("a", 1, side=64))
        assert client.stats.mm_queries[0] == 1, "counted without an output"


async def test_a_uuid_bound_elsewhere_is_a_conflict():
    async with running(1) as (_, client):
        first, second = make_request("a", 1), make_request("b", 2)
        first.binds = [(b"u" * 32, b"1" * 32)]
        second.binds = [(b"u" * 32, b"2" * 32)]
        await collect(client, first)
        await until(lambda: client.lookup_alias(b"u" * 32) == b"1" * 32)
        with pytest.raises(MediaConflict):
            await collect(client, second)


async def test_sequences_of_a_request_count_its_items_once():
    """Regression: n = 3 counted three queries and two hits for one new picture."""
    async with running(1) as (_, client):
        for name, hits in (("a", 0), ("b", 1)):
            sequences = fan_out(make_request(name, 1), 3)
            tokens = await asyncio.gather(*(collect(client, one) for one in sequences))
            assert tokens == [expected(one) for one in sequences]
            assert client.stats.mm_hits[0] == hits
        assert client.stats.mm_queries[0] == 2


async def test_mirrors_can_be_compared_with_engines():
    """/debug/mirrors tells the same digest as the engine's directory has."""
    async with running(2) as (scripted, client):
        await collect(client, make_request("a", 1, 2))
        views = client.mirrors()
        assert views.keys() == scripted.engines.keys()
        for name, engine in scripted.engines.items():
            await until(lambda n=name: not client.mirrors()[n].num_optimistic)
            assert client.mirrors()[name].digest == digest_of(engine.receiver.store.announced())
            assert client.mirrors()[name].inflight_bytes == 0
        assert sum(view.num_confirmed for view in client.mirrors().values()) == 2


async def test_every_address_behind_a_name_is_an_engine_beside_those_with_an_address():
    scripted = ScriptedEngines(3)
    answers = [["10.0.0.1", "10.0.0.2"]]
    scripted.hubs = {f"tcp://10.0.0.{i + 1}:5570": h for i, h in enumerate(scripted.hubs.values())}

    def resolve(host: str, port: int) -> list[str]:
        assert (host, port) == ("engines.svc", 5570)
        if not answers:
            raise OSError("the name server has a bad moment")
        return answers.pop()

    config = FrontendConfig(
        model=ModelConfig(path="/nowhere"),
        engines=(
            EngineAddress(endpoint="tcp://engines.svc", dns=True),
            EngineAddress(endpoint="tcp://10.0.0.3:5570"),
        ),
    )
    client = EngineClient(
        config, NS, resolve=resolve,
        open_transport=lambda endpoint: scripted.hubs[endpoint].connect(client.frontend_id),
    )  # fmt: skip
    await client.start()
    await until(lambda: client.num_ready_engines() == 3)
    request = make_request("a", 1)
    assert await collect(client, request) == expected(request)
    await client.close()
    for engine in scripted.engines.values():
        await engine.stop()


async def test_health_means_a_stepping_engine():
    async with running(1) as (scripted, client):
        engine = next(iter(scripted.engines.values()))
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
        for key in (b"b" * 32, b"c" * 32):
            client.put([SendItem(key, len(data))], {key: SendValue(data, digest(data))})
        assert all(link.sender.inflight_bytes for link in client.links()), "to the most room"


async def test_series_of_engines_that_left_are_forgotten(start_input):
    made = await start_input()
    async with running(2) as (scripted, client):
        metrics = Metrics("frontend", model_name="m", process="frontend-0")
        metrics.add_source(media_source(client.stats, made, client))
        await collect(client, make_request("a", 1))
        [gone] = scripted.taken()
        [stays] = {link.name for link in client.links()} - {gone}
        assert f'engine="{gone}"' in metrics.exposition().decode()
        client.set_endpoints([link.endpoint for link in client.links() if link.name == stays])
        page = metrics.exposition().decode()
        assert f'engine="{gone}"' not in page
        assert f'engine="{stays}"' in page
        assert not client.stats.picks


async def test_others_have_a_turn_between_large_messages():
    """Scores of prompts: some take 20 ms to read, and the next one was read at once."""
    async with running(1) as (scripted, client):
        [engine], [link] = scripted.engines.values(), scripted.transports.values()
        engine.is_silent = link.faults.hold_down = True
        await asyncio.sleep(0.01)  # what is on its way
        before, large = link.counters.messages_received, (100_000,) * 300_000
        for _ in range(3):
            engine._outputs(client.frontend_id, EngineOutput(("unknown", 0), large))
        link.release()
        turns = [before]
        while turns[-1] < before + 3:
            await asyncio.sleep(0)
            turns.append(link.counters.messages_received)
        assert set(turns) == {before, before + 1, before + 2, before + 3}
