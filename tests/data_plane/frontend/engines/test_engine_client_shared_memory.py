"""Values through shared memory: files, fallbacks, and an engine that cannot open them."""

import contextlib

import msgspec
import pytest

from foveal_runtime.frontend.engines.client import EngineClient
from foveal_runtime.frontend.testing.fake_engine import ScriptedEngine
from foveal_runtime.mirror.receiver import ReceiverLimits
from foveal_runtime.plan.config import EngineAddress, FrontendConfig, ModelConfig
from foveal_runtime.plan.errors import (
    StartupError,
)
from foveal_runtime.wire.shm import SharedReader
from foveal_runtime.wire.testing.inprocess import InProcessHub
from tests.support.scripted_engines import NS, collect, expected, make_request, until


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
