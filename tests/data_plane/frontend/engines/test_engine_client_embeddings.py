"""Requests that are embedded, at the engine client: an engine dies, or is too old for them."""

import asyncio

import msgspec
import pytest

from foveal_runtime.plan.errors import NoEngine
from foveal_runtime.plan.sampling import SamplingParams, grammar_version
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineInfo
from tests.support.scripted_engines import make_request, running, until


def embed_request(name: str):
    request = make_request(name, 1)
    request.sampling = msgspec.structs.replace(request.sampling, max_tokens=1, pooling="mean")
    return request


async def embedding_of(client, request) -> bytes:
    [output] = [output async for output in client.generate(request)]
    assert output.finish == "stop"
    assert not output.token_ids
    return output.embedding


async def test_a_request_that_loses_its_engine_is_embedded_by_another():
    async with running(2) as (scripted, client):
        for engine in scripted.engines.values():
            engine.allowance = 0
        task = asyncio.create_task(embedding_of(client, embed_request("a")))
        await until(lambda: any(engine.served for engine in scripted.engines.values()))
        victim = next(engine for engine in scripted.engines.values() if engine.served)
        other = next(engine for engine in scripted.engines.values() if engine is not victim)
        other.allowance = None
        await victim.stop()
        found = await task
        assert other.served[0].body.sampling.pooling == "mean"
        assert found == await embedding_of(client, embed_request("b"))
        assert sum(client.stats.resubmissions.values()) == 1


async def test_an_engine_that_knows_no_embeddings_gets_none():
    """It would answer with a token: fields that it does not know are dropped on arrival."""
    async with running(2, wait_seconds=0.2) as (scripted, client):
        old, new = scripted.engines.values()
        for engine in (old, new):
            engine.info = msgspec.structs.replace(engine.info, pools=engine is new)
            engine.receiver.info = codec.encode_info(engine.info)
            engine.restart()
        await until(lambda: sum(link.info is not None and link.info.pools
                                for link in client.links()) == 1)  # fmt: skip
        for number in range(4):
            assert await embedding_of(client, embed_request(f"a{number}"))
        assert not old.served
        await new.stop()
        with pytest.raises(NoEngine, match="another version, which do not know"):
            await embedding_of(client, embed_request("b"))
        scored = make_request("c", 1)
        scored.sampling = msgspec.structs.replace(
            scored.sampling, logprobs=1, logprob_token_ids=(7,)
        )
        with pytest.raises(NoEngine, match="another version, which do not know"):
            await anext(client.generate(scored))
        assert not old.served
        await old.stop()
        await until(lambda: not client.num_ready_engines())
        with pytest.raises(NoEngine, match=r"no engine was ready within 0\.2 s$"):
            await embedding_of(client, embed_request("d"))


def test_engines_that_pool_score_the_tokens_that_a_request_names():
    """Both came with one version; an older engine would score the most likely tokens instead."""
    info = EngineInfo("e0", "m", "r", 10, 2)
    plain = SamplingParams(max_tokens=1, logprobs=1)
    named = SamplingParams(max_tokens=1, logprobs=1, logprob_token_ids=(7,))
    assert info.serves(plain)
    assert not info.serves(named)
    assert msgspec.structs.replace(info, pools=True).serves(named)


def test_an_engine_that_knows_no_grammars_or_others_gets_none():
    """It would leave the grammar out, or read it in another way."""
    free = SamplingParams(max_tokens=1)
    bound = msgspec.structs.replace(free, grammar='start: "a"')
    for known, serves in ((grammar_version(), True), ("", False), ("llguidance-0.0.1", False)):
        info = EngineInfo("e0", "m", "r", 10, 2, grammars=known)
        assert info.serves(free)
        assert info.serves(bound) == serves, known
