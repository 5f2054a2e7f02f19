"""What an engine died of: written down before each step, read by whoever comes next."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import msgspec
import pytest

from foveal_runtime.engine.process.assemble import LoadedEngine, assemble_core
from foveal_runtime.engine.process.evidence import StepRecord
from foveal_runtime.engine.process.server import EngineServer
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend
from foveal_runtime.engine.testing.fake_runner import FakeRunner
from foveal_runtime.engine.types.step import RunnerLost, StepPlan
from foveal_runtime.main.engine import _record_path
from foveal_runtime.mirror.messages import Bye, Death, Refusals
from foveal_runtime.mirror.refusals import QUARANTINE_SECONDS
from foveal_runtime.plan.budget.encoder import LargestItem
from foveal_runtime.plan.config import EngineCaches, EngineConfig, ModelConfig, SchedulerConfig
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import RequestBody
from foveal_runtime.wire.transport import ZmqDealer, ZmqRouter

POISON = 666


def key(name: str) -> bytes:
    return name.encode().ljust(16, b".")


class Engine:
    """An engine's core under a hand crank; it fails in the step that first sees POISON."""

    def __init__(self, run_ahead: str = "off", error: type[Exception] = ValueError) -> None:
        def fail(plan):
            if any(POISON in new.token_ids for new in plan.new):
                raise error("a step that kills")

        config = EngineConfig(
            model=ModelConfig(path="/models/fake"),
            caches=EngineCaches(ipc_bytes=1 << 20, block_size=4),
            scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=8),
            run_ahead=run_ahead,
        )
        runner = FakeRunner(num_blocks=64, block_size=4, on_execute=fail)
        loaded = LoadedEngine(
            runner=runner, num_blocks=64, max_model_len=200,
            largest={"image": LargestItem(24, 24)},
        )  # fmt: skip
        self.sent = []
        self.frontend = FakeFrontend("f")
        self.core = assemble_core(
            config, loaded, send=lambda fid, message: self.sent.append(message), boot=7
        )
        self.say(self.frontend.hello())

    def say(self, sending) -> None:
        self.core.on_message("f", sending.message)
        self.hear()

    def hear(self) -> None:
        while self.sent:
            for sending in self.frontend.take(self.sent.pop(0)):
                self.core.on_message("f", sending.message)

    def ask(self, name: str, *ids: int, on_trial: bool = False) -> None:
        body = RequestBody(
            token_ids=codec.pack_tokens(ids, wide=False)[0], wide=False, placements=(),
            sampling=SamplingParams(max_tokens=50, ignore_eos=True), key=key(name),
            on_trial=on_trial,
        )  # fmt: skip
        self.say(self.frontend.request((name, 0), ids, body=body))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.core.step()
            self.hear()

    def die(self) -> Death | None:
        """Steps until it fails; what the goodbye says."""
        with pytest.raises((ValueError, RunnerLost)) as caught:
            self.step(20)
        self.core.on_failure(caught.value)
        [bye] = [message for message in self.sent if isinstance(message, Bye)]
        assert bye.reason == "engine_failed"
        return bye.death


@pytest.mark.parametrize("run_ahead", ["on", "off"])
def test_the_newcomer_of_the_fatal_step_is_named_alone(run_ahead):
    """Every request of an engine that died was charged with its death."""
    engine = Engine(run_ahead)
    for number in range(5):
        engine.ask(f"old{number}", 1, 2, number + 3)
    engine.step(8)
    engine.ask("bad", 5, POISON)
    death = engine.die()
    assert (death.boot, death.suspects, death.is_own) == (7, (key("bad"),), True)


def test_all_that_are_new_in_the_fatal_step_are_suspects_and_a_lost_rank_proves_nothing():
    engine = Engine(error=RunnerLost)
    engine.ask("old", 1, 2, 3)
    engine.step(8)
    engine.ask("one", 4, 5)
    engine.ask("bad", 5, POISON)
    death = engine.die()
    assert set(death.suspects) == {key("one"), key("bad")}
    assert not death.is_own


def test_a_request_on_trial_is_the_only_suspect_and_the_next_one_waits():
    engine = Engine()
    engine.ask("first", 1, 2, on_trial=True)
    engine.ask("bad", 5, POISON, on_trial=True)
    engine.ask("new", 3, 4)
    engine.step()
    assert {entry.key for entry in engine.core.scheduler.running} == {key("first"), key("new")}
    engine.ask("newer", 3, 4, 5)
    assert engine.die().suspects == (key("bad"),)
    assert len(engine.frontend.tokens["first", 0]) >= 2


def test_streams_let_in_beside_an_encoder_are_not_suspects(monkeypatch):
    """They were charged with what the image in the middle of which they go on may do; and the
    server did not hear that they go on."""
    engine = Engine()
    engine.ask("old", 1, 2, 3)
    engine.step(8)
    engine.ask("new", 4, 5)
    core, seen, heard = engine.core, [], []
    submit = core.runner.submit

    def split(plan):
        streams = [entry for entry in plan.scheduled if entry.num_scheduled_tokens == 1]
        plan.scheduled = [entry for entry in plan.scheduled if entry.num_scheduled_tokens > 1]
        return StepPlan(plan.step, scheduled=streams), plan

    def watch(plan, between):
        seen.append(core.record.death(is_own=True).suspects)
        if plan.new:
            between()
        return submit(plan, between)

    monkeypatch.setattr(core.scheduler, "split", split)
    monkeypatch.setattr(core.runner, "submit", watch)
    monkeypatch.setattr(core, "on_interlude", lambda: heard.append(core.stats.num_steps))
    steps = core.stats.num_steps
    engine.step()
    assert seen == [(key("old"),), (key("new"),), (key("new"),)]
    assert heard == [steps + 1, steps + 2]


def test_a_convicted_request_is_refused_even_where_its_frontend_does_not_know():
    """A frontend that had not heard of the conviction lost a second engine to it."""
    engine = Engine()
    at = time.time()
    entries = (key("bad"), at, ""), (key("old"), at - QUARANTINE_SECONDS, "")
    engine.core.receiver.refusals.join(Refusals(entries=entries))
    engine.ask("bad", 5, POISON)
    engine.ask("old", 5, 6)
    engine.step(100)
    assert engine.frontend.errors["bad", 0][0] == "request_quarantined"
    assert len(engine.frontend.tokens["old", 0]) == 50
    assert engine.frontend.finish == {("bad", 0): "error", ("old", 0): "length"}


def test_one_that_waits_for_its_trial_may_leave():
    engine = Engine()
    engine.ask("first", 1, 2, on_trial=True)
    engine.ask("second", 5, 6, on_trial=True)
    engine.say(engine.frontend.sender.abort(("second", 0)))
    engine.ask("third", 7, 8, on_trial=True)
    engine.step(8)
    assert engine.frontend.tokens["third", 0]
    assert not engine.frontend.tokens["second", 0]
    engine.core.check_integrity()


_DOOMED = """
import ctypes, os, pathlib, signal, sys
from foveal_runtime.engine.process.evidence import StepRecord
record = StepRecord(3, pathlib.Path(sys.argv[1]))
assert record.last is None
record.watch_crashes()
record.begin((b"a" * 16,))
record.end()
record.begin((b"b" * 16, b"c" * 16))
if sys.argv[2] == "crash":
    ctypes.string_at(0)
elif sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
record.end()
"""


@pytest.mark.parametrize(
    ("way", "code"), [("crash", -signal.SIGSEGV), ("kill", -signal.SIGKILL), ("end", 0)]
)
def test_the_record_outlives_its_process(way, code, tmp_path):
    path = tmp_path / "step"
    began = time.time()
    done = subprocess.run([sys.executable, "-c", _DOOMED, str(path), way], check=False)
    assert done.returncode == code
    record = StepRecord(4, path)
    if way == "end":
        assert record.last is None
    else:
        assert record.last.boot == 3
        assert record.last.suspects == (b"b" * 16, b"c" * 16)
        assert record.last.is_own == (way == "crash")
        assert began - 1 < record.last.at < time.time() + 1
        assert ("Segmentation fault" in record.crash) == (way == "crash")
    record.close()
    assert not path.exists()
    again = StepRecord(5, path)
    assert again.last is None
    again.close()


def test_a_record_that_cannot_be_kept_costs_nothing(tmp_path):
    (tmp_path / "target").write_bytes(b"theirs")
    (tmp_path / "step").symlink_to(tmp_path / "target")
    record = StepRecord(1, tmp_path / "step")
    record.begin((b"a" * 16,))
    assert record.death(is_own=True).suspects == (b"a" * 16,)
    record.close()
    assert (tmp_path / "target").read_bytes() == b"theirs"


def test_an_engine_of_the_same_name_that_runs_keeps_its_record(tmp_path):
    """Two engines that shared a folder and a port wrote into one file."""
    path = tmp_path / "step"
    first = StepRecord(1, path)
    first.begin((b"a" * 16,))
    second = StepRecord(2, path)
    assert second.last is None
    second.begin((b"b" * 16,))
    second.close()
    assert path.exists()
    first.end()
    first.close()
    assert not path.exists()


def test_each_engine_has_a_record_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = EngineConfig(model=ModelConfig(path="/m"), bind="tcp://0.0.0.0:9", engine_id="e0")
    others = [
        msgspec.structs.replace(config, engine_id="e1"),
        msgspec.structs.replace(config, bind="tcp://0.0.0.0:8"),
        msgspec.structs.replace(config, model=ModelConfig(path="/n")),
    ]
    assert _record_path(config) == _record_path(config)
    assert len({_record_path(one) for one in (config, *others)}) == 4
    mine = _record_path(config)
    monkeypatch.setattr(socket, "gethostname", lambda: "another-container")
    assert _record_path(config) != mine


def test_the_record_has_its_blocks_before_it_is_written_to(tmp_path):
    """On a full disk, the first write through the map to a hole of the file was a SIGBUS."""
    record = StepRecord(1, tmp_path / "step")
    facts = (tmp_path / "step").stat()
    assert facts.st_blocks * 512 >= facts.st_size > 16_000
    record.close()


def test_a_crash_is_dated_by_its_traceback(tmp_path):
    """A request that had run for an hour when it crashed was convicted for an hour ago, that is,
    not for long."""
    path = tmp_path / "step"
    command = [sys.executable, "-c", _DOOMED, str(path), "crash"]
    subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    later = time.time() + 3600
    os.utime(path, (later, later))
    record = StepRecord(2, path)
    assert abs(record.last.at - later) < 1
    record.close()


def test_a_record_that_fails_to_open_leaves_no_file_open(tmp_path):
    path = tmp_path / "step"
    os.mkfifo(path)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        record = StepRecord(number, path)
        record.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_disk_that_is_full_at_the_end_changes_nothing_of_what_is_told(tmp_path):
    record = StepRecord(1, tmp_path / "step")
    record.begin((b"a" * 16,))
    descriptor, record._file = record._file, os.open("/dev/full", os.O_WRONLY)
    try:
        assert record.death(is_own=True).suspects == (b"a" * 16,)
    finally:
        os.close(record._file)
        record._file = descriptor
    record.end()
    record.close()


async def test_the_next_process_tells_while_it_loads():
    """Suspects would wait for as long as a model loads."""
    death = Death(3, 1.0, (key("bad"),), True)
    gate, endpoints = threading.Event(), []

    def make_core():
        assert gate.wait(120)
        raise ValueError("loaded enough")

    def make_transport():
        router = ZmqRouter("tcp://127.0.0.1:0")
        endpoints.append(router.endpoint)
        return router

    server = EngineServer()

    def run():
        with pytest.raises(ValueError, match="loaded enough"):
            server.run(make_core, make_transport, last_death=death)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        async with asyncio.timeout(120):
            while not endpoints:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
            link, frontend = ZmqDealer(endpoints[0], "f"), FakeFrontend("f")
            await link.connected()
            link.send(codec.encode_up(frontend.hello()))
            bye = codec.decode_down(await link.recv())
            assert (bye.reason, bye.death) == ("loading", death)
            link.close()
    finally:
        gate.set()
        thread.join(20)
