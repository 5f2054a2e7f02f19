"""An engine server in a thread, and fake frontends on real sockets."""

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request

from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.server import EngineServer
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend, FakeItem
from foveal_runtime.engine.testing.fake_runner import FakeRunner
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.wire import codec
from foveal_runtime.wire.transport import ZmqDealer, ZmqRouter

CONFIG = EngineConfig(
    model=ModelConfig(path="/models/fake"),
    caches=EngineCaches(ipc_bytes=1 << 20, ipc_staging_bytes=1 << 21, block_size=4),
    scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
)
MAX_MODEL_LEN = 200
A = FakeItem("A", 6, 5000)


class Harness:
    """An engine server in a thread."""

    def __init__(self, on_execute=None, gate=None, config=CONFIG, **options):
        self.server = EngineServer(**options)
        self.ready = threading.Event()
        self.gate, self.config = gate, config
        self.on_execute = on_execute
        self.code = None
        self.thread = threading.Thread(target=self._run)

    def make_core(self):
        if self.gate is not None:
            assert self.gate.wait(120)
        self.runner = FakeRunner(num_blocks=64, block_size=4, on_execute=self.on_execute)
        loaded = LoadedEngine(
            runner=self.runner, num_blocks=64, max_model_len=MAX_MODEL_LEN,
            largest={"image": LargestItem(24, 24)},
        )  # fmt: skip
        self.core = assemble_core(self.config, loaded, send=self.server.send)
        return self.core

    def _run(self):
        self.code = self.server.run(
            self.make_core,
            lambda: ZmqRouter("tcp://127.0.0.1:0"),
            on_ready=lambda endpoint: self.ready.set(),
        )

    def get(self, path):
        url = f"http://127.0.0.1:{self.server.health.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def join(self):
        self.thread.join(120)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def engine(**options):
    harness = Harness(**options)
    harness.thread.start()
    try:
        if options.get("gate") is None:
            assert harness.ready.wait(120)
        yield harness
    finally:
        harness.server.request_stop()
        harness.join()


class Client:
    """A fake frontend on a real socket."""

    def __init__(self, harness, name="f1"):
        self.fake = FakeFrontend(name)
        self.link = ZmqDealer(harness.server.endpoint, name)

    async def open(self):
        await self.link.connected()
        self.send(self.fake.hello())
        await self.until(lambda: self.fake.sender.is_up or self.fake.over)

    def send(self, sending):
        self.link.send(codec.encode_up(sending))

    async def until(self, condition):
        async with asyncio.timeout(120):
            while not condition():
                frames = await self.link.recv()
                for answer in self.fake.take(codec.decode_down(frames)):
                    self.send(answer)

    def check(self, rid):
        """It has ended, with the tokens it must."""
        found = self.fake.tokens[rid], self.fake.finish.get(rid)
        assert found == self.fake.expected(rid, MAX_MODEL_LEN)
