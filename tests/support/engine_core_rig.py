"""An engine's core with its frontends, and messages carried between them as bytes."""

from collections import deque

from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.testing.drive import FakeClock
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend, FakeItem
from foveal_runtime.engine.testing.fake_runner import FakeRunner
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.wire import codec


class Engine:
    """A core, its frontends, and messages carried between them as bytes."""

    def __init__(self, *, caches=None, scheduler=None, num_blocks=64, events=None, max_len=200,
                 run_ahead="off", largest_request_bytes=0):  # fmt: skip
        self.clock, self.max_len = FakeClock(), max_len
        config = EngineConfig(
            model=ModelConfig(path="/models/fake"),
            caches=caches or EngineCaches(ipc_bytes=4000, ipc_staging_bytes=8000, block_size=4),
            scheduler=scheduler or SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
            run_ahead=run_ahead,
        )
        block_size = config.caches.block_size
        self.runner = FakeRunner(num_blocks=num_blocks, block_size=block_size)
        loaded = LoadedEngine(
            runner=self.runner, num_blocks=num_blocks, max_model_len=max_len,
            largest={"image": LargestItem(24, 24)}, largest_request_bytes=largest_request_bytes,
        )  # fmt: skip
        self.sent = []
        self.going_up = deque()
        self.frontends = {}
        self.core = assemble_core(
            config, loaded, send=lambda fid, m: self.sent.append((fid, m)), clock=self.clock,
            events=events, boot=1,
        )  # fmt: skip

    def connect(self, name="f1", boot=1, **options):
        frontend = self.frontends[name] = FakeFrontend(name, boot=boot, **options)
        self.up(frontend, frontend.hello())
        return frontend

    def up(self, frontend, sending):
        """One message up, through its bytes, and all that it leads to, in order."""
        self.going_up.append((frontend, sending))
        while self.going_up or self.sent:
            if self.going_up:
                self._take_up(*self.going_up.popleft())
            else:
                self._take_down(*self.sent.pop(0))

    def _take_up(self, frontend, sending):
        frames = [memoryview(bytes(frame)) for frame in codec.encode_up(sending)]
        message = codec.decode_up(frames)
        values = codec.open_values(message, frames)
        self.core.on_message(frontend.sender.frontend_id, message, values)

    def _take_down(self, fid, message):
        frontend = self.frontends[fid]
        answers = frontend.take(codec.decode_down(codec.encode_down(message)))
        self.going_up.extend((frontend, answer) for answer in answers)

    def deliver(self):
        while self.sent:
            self._take_down(*self.sent.pop(0))
            while self.going_up:
                self._take_up(*self.going_up.popleft())

    def step(self):
        self.core.step()
        self.clock.now += 0.01
        self.deliver()
        self.core.check_integrity()

    def run(self, max_steps=1000):
        """Until nothing happens any more and all notes are out."""
        for _ in range(max_steps):
            if not self.core.has_work and self.core.seconds_to_note() is None:
                return
            if not self.core.has_work:
                self.clock.now += self.core.seconds_to_note()
            self.step()
        raise AssertionError("the engine does not come to rest")

    def check(self, frontend, rid):
        """It has ended, with the tokens it must."""
        found = frontend.tokens[rid], frontend.finish.get(rid)
        assert found == frontend.expected(rid, self.max_len), rid

    def assert_clean(self):
        core = self.core
        assert core.num_unfinished == 0
        assert core.scheduler.pool.num_used_blocks == 0
        assert core.scheduler.encoder.num_used_embeds == 0
        assert core.receiver.store.held_bytes == 0
        assert core.receiver.store.bypass_bytes == 0
        core.check_integrity()


A, B, C = (FakeItem(name, tokens) for name, tokens in (("A", 6), ("B", 9), ("C", 12)))


def early_release(ipc_bytes: int = 4000, num_blocks: int = 64, run_ahead: str = "off") -> Engine:
    caches = EngineCaches(
        ipc_bytes=ipc_bytes, ipc_staging_bytes=8000, block_size=4, prefix_caching=False,
        encoder_embeds=24, unpin_at="encoded",
    )  # fmt: skip
    return Engine(caches=caches, num_blocks=num_blocks, run_ahead=run_ahead)
