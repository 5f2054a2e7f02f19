"""An engine with its threads and sockets: sessions, health, drain, death."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from foveal_runtime.engine.process.health import digest_of
from foveal_runtime.engine.process.link_thread import SILENT_SECONDS
from foveal_runtime.engine.process.server import GOODBYE_SECONDS, EngineServer, Phase
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire.transport import (
    DEAD_AFTER_MS,
    HEARTBEAT_MS,
    LinkDown,
    ZmqRouter,
)
from tests.support.engine_server_rig import CONFIG, A, Client, engine


async def test_requests_of_two_frontends_over_real_sockets():
    with engine() as harness:
        one, two = Client(harness, "f1"), Client(harness, "f2")
        await one.open()
        await two.open()
        one.send(one.fake.request(("r", 0), [1, 2, A, 3], max_tokens=8))
        await one.until(lambda: ("r", 0) in one.fake.finish)
        await two.until(lambda: two.fake.sender.believes(A.mm_hash))
        sending = two.fake.request(("r", 0), [9, A, 3], max_tokens=8)
        assert sending.frames == []
        two.send(sending)
        await two.until(lambda: ("r", 0) in two.fake.finish)
        for client in (one, two):
            client.check(("r", 0))
        assert two.fake.first["r", 0].num_encoder_hits == 1
        await one.until(lambda: one.fake.num_heartbeats > 0)
        one.link.close()
        two.link.close()
    assert harness.code == 0
    assert harness.runner.closed


async def test_health_while_loading_and_when_ready():
    gate = threading.Event()
    with engine(gate=gate, render_metrics=lambda: b"some_metric 1\n") as harness:
        assert harness.get("/livez")[0] == 200
        assert harness.get("/readyz") == (503, "loading\n")
        gate.set()
        assert harness.ready.wait(120)
        assert harness.get("/readyz") == (200, "ok\n")
        assert harness.get("/metrics") == (200, "some_metric 1\n")
        assert harness.get("/other")[0] == 404


async def test_metrics_that_cannot_be_rendered_are_a_500_and_not_the_end():
    def render():
        raise ValueError("no such series")

    with engine(render_metrics=render) as harness:
        assert harness.get("/metrics")[0] == 500
        assert harness.get("/livez")[0] == 200


async def test_a_step_that_hangs_fails_the_liveness_probe_and_idling_does_not():
    now = [100.0]
    hang, entered = threading.Event(), threading.Event()

    def on_execute(plan):
        entered.set()
        assert hang.wait(120)

    with engine(on_execute=on_execute, clock=lambda: now[0], stall_seconds=30) as harness:
        now[0] += 1000
        assert harness.get("/livez")[0] == 200, "idle is alive"
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, 2, 3], max_tokens=2))
        assert await asyncio.to_thread(entered.wait, 120)
        assert harness.get("/livez")[0] == 200
        now[0] += 31
        status, reason = harness.get("/livez")
        assert status == 503
        assert "no step ended for 31 s" in reason
        hang.set()
        await client.until(lambda: ("r", 0) in client.fake.finish)
        assert harness.get("/livez")[0] == 200
        client.link.close()


async def test_drain_finishes_requests_refuses_sessions_and_ends():
    hold = threading.Semaphore(0)  # one step per permit; each output the client gets gives one
    with engine(on_execute=lambda plan: hold.acquire(timeout=120)) as harness:
        client, late = Client(harness, "f1"), Client(harness, "f2")
        await client.open()
        await late.link.connected()
        client.send(client.fake.request(("r", 0), [1, 2, 3], max_tokens=190))
        hold.release(3)
        await client.until(lambda: len(client.fake.tokens["r", 0]) == 3)
        harness.server.request_drain()
        hold.release(2)
        await client.until(lambda: client.fake.load.draining)
        assert await asyncio.to_thread(harness.get, "/readyz") == (503, "draining\n")
        late.send(late.fake.hello())

        def over():
            hold.release()
            return client.fake.over

        await asyncio.gather(late.until(lambda: late.fake.over), client.until(over))
        assert late.fake.over == "draining"
        assert client.fake.finish["r", 0] == "length"
        client.check(("r", 0))
        assert client.fake.over == "draining"
        await asyncio.to_thread(harness.join)
        assert harness.code == 0
        client.link.close()
        late.link.close()


async def test_a_drain_has_an_end():
    """It comes before the timeout does, so that there is time to say goodbye."""
    now, hold = [100.0], threading.Semaphore(0)
    clock = {"clock": lambda: now[0], "drain_timeout_seconds": GOODBYE_SECONDS + 10}
    with engine(on_execute=lambda plan: hold.acquire(timeout=120), **clock) as harness:
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, 2, 3], max_tokens=190))
        hold.release()
        await client.until(lambda: client.fake.tokens["r", 0])
        harness.server.request_drain()
        hold.release(2)
        await client.until(lambda: client.fake.load.draining)
        now[0] += 9
        made = len(client.fake.tokens["r", 0])
        hold.release(2)
        await client.until(lambda: len(client.fake.tokens["r", 0]) >= made + 2)
        assert not client.fake.over
        now[0] += 1
        hold.release()
        await client.until(lambda: client.fake.over)
        assert client.fake.over == "draining"
        assert client.fake.lost == [("r", 0)]
        assert not client.fake.finish
        await asyncio.to_thread(harness.join)
        assert harness.code == 0
        client.link.close()


async def test_a_warm_set_that_cannot_be_saved_fails_no_drain(tmp_path, caplog):
    """The requests are done: an exit code of 1 would count as a crash."""
    caches = msgspec.structs.replace(
        CONFIG.caches, warm_directory=str(tmp_path), warm_bytes=1 << 20
    )
    with engine(config=msgspec.structs.replace(CONFIG, caches=caches)) as harness:
        asked = []

        def save_encoder(path, mm_hashes):
            asked.append(mm_hashes)
            raise RuntimeError("device lost")

        harness.runner.save_encoder = save_encoder
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, A, 3]))
        await client.until(lambda: ("r", 0) in client.fake.finish)
        harness.server.request_drain()
        await client.until(lambda: client.fake.over)
        await asyncio.to_thread(harness.join)
        client.link.close()
    assert asked == [[A.mm_hash]]
    assert harness.code == 0
    assert harness.server.phase is Phase.STOPPED
    assert "the warm set was not saved" in caplog.text
    assert "device lost" in caplog.text


async def test_a_failing_step_ends_the_engine_with_a_word():
    def on_execute(plan):
        raise RuntimeError("device lost")

    with engine(on_execute=on_execute) as harness:
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, 2, 3]))
        await client.until(lambda: client.fake.over)
        assert client.fake.over == "engine_failed"
        assert client.fake.lost == [("r", 0)]
        await asyncio.to_thread(harness.join)
        assert harness.code == 1
        assert harness.server.phase is Phase.FAILED
        client.link.close()


async def test_garbage_ends_a_session_and_not_the_engine():
    with engine() as harness:
        client, other = Client(harness, "f1"), Client(harness, "f2")
        await client.open()
        await other.open()
        client.link.send([b"\xc1 not msgpack"])
        await client.until(lambda: client.fake.over)
        assert client.fake.over == "bad_message"
        other.send(other.fake.request(("r", 0), [1, A, 3]))
        await other.until(lambda: ("r", 0) in other.fake.finish)
        other.check(("r", 0))
        client.link.close()
        other.link.close()


async def test_the_books_can_be_looked_at_from_outside():
    """/debug/integrity: in use while a request runs, all back when it was aborted."""
    steps = threading.Semaphore(3)
    hold = threading.Event()

    def on_execute(plan):
        if not steps.acquire(blocking=False):
            hold.wait(120)

    with engine(on_execute=on_execute, engine_id="engine-7") as harness:
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, A, 2], max_tokens=100))
        await client.until(lambda: client.fake.tokens.get(("r", 0)))
        asked = asyncio.create_task(asyncio.to_thread(harness.get, "/debug/integrity"))
        hold.set()
        status, text = await asked
        state = json.loads(text)
        assert (status, state["engine"], state["broken"]) == (200, "engine-7", "")
        client.send(client.fake.sender.abort(("r", 0)))
        while not state["idle"]:
            state = json.loads((await asyncio.to_thread(harness.get, "/debug/integrity"))[1])
            assert not state["broken"]
        assert state["kv_blocks_in_use"] == state["encoder_references"] == 0
        assert state["mm_pinned_bytes"] == state["mm_staged_bytes"] == 0
        assert state["mm_used_bytes"] == len(A.value) <= state["mm_capacity_bytes"]
        assert state["mm_digest"] == digest_of([A.mm_hash])
        client.link.close()


def test_books_that_disagree_are_told_and_the_engine_goes_on():
    with engine() as harness:
        harness.core.receiver.store.pinned_bytes += 1
        status, text = harness.get("/debug/integrity")
        assert status == 200
        assert "pinned_bytes" in json.loads(text)["broken"]
        assert harness.get("/livez")[0] == 200
        harness.core.receiver.store.pinned_bytes -= 1


async def test_an_idle_engine_checks_its_books():
    with engine(idle_check_seconds=0.01) as harness:
        client = Client(harness)
        await client.open()
        client.send(client.fake.request(("r", 0), [1, A, 3]))
        await client.until(lambda: client.fake.finish)
        before = harness.server.num_idle_checks
        async with asyncio.timeout(120):
            while harness.server.num_idle_checks < before + 2:  # noqa: ASYNC110 - a thread's
                await asyncio.sleep(0.01)
        assert harness.server.phase is Phase.READY
        harness.core.receiver.store.idle_bytes += 1
        harness.join()
        assert harness.code == 1
        assert harness.server.phase is Phase.FAILED
        client.link.close()


def test_an_engine_that_loads_has_no_books_yet():
    gate = threading.Event()
    with engine(gate=gate) as harness:
        while not harness.server.health._thread.is_alive():
            pass
        assert harness.get("/debug/integrity")[0] == 503
        gate.set()


async def test_a_busy_event_loop_keeps_its_session():
    """A frontend whose loop was busy for 30 s lost its sessions and all its streams: heartbeats
    came from that loop. Here it is blocked, that is, nothing of it runs but the transport's own
    thread, for longer than a peer may be dead, while the engine's clock says an hour."""
    now = [100.0]
    with engine(clock=lambda: now[0]) as harness:
        client = Client(harness)
        await client.open()
        for _ in range(50):
            now[0] += 72.0
            harness.server._links._transport.wake()
            time.sleep((DEAD_AFTER_MS + HEARTBEAT_MS) / 1000 / 50)  # noqa: ASYNC251 - blocked
        client.send(client.fake.request(("r", 0), range(1, 20), max_tokens=4))
        await client.until(lambda: ("r", 0) in client.fake.finish or client.fake.over)
        assert not client.fake.over
        assert client.fake.num_heartbeats > 2
        client.link.close()


async def test_what_a_frontend_that_hangs_owes_is_asked_of_another():
    """Its transport lives, its loop does not: what it owed blocked every other frontend for as
    long as its process lived. Without debts, it keeps its session for an hour (above)."""
    now = [100.0]
    with engine(clock=lambda: now[0]) as harness:
        hangs, other = Client(harness, "f1"), Client(harness, "f2")
        await hangs.open()
        await other.open()
        hangs.send(hangs.fake.request(("r", 0), [1, A, 2], with_values=False))
        async with asyncio.timeout(20):
            while not harness.core.receiver.admission.pending:  # noqa: ASYNC110 - another thread's
                await asyncio.sleep(0.01)
        other.send(other.fake.request(("s", 0), [1, A, 3], max_tokens=4))

        async def let_time_pass():
            while True:
                heard = other.fake.num_heartbeats
                now[0] += 2.0  # longer than between two beats, shorter than a standstill
                other.send(other.fake.sender.heartbeat())
                while other.fake.num_heartbeats == heard:
                    harness.server._links._transport.wake()
                    await asyncio.sleep(0.01)

        passing = asyncio.create_task(let_time_pass())
        await other.until(lambda: ("s", 0) in other.fake.finish)
        passing.cancel()
        other.check(("s", 0))
        assert now[0] > 100.0 + SILENT_SECONDS
        await hangs.until(lambda: hangs.fake.over)
        assert (hangs.fake.over, hangs.fake.lost) == ("silent", [("r", 0)])
        hangs.link.close()
        other.link.close()


async def test_a_frontend_that_stands_still_is_given_up():
    """Its process is stopped, and the transport's thread with it."""
    with engine() as harness:
        process = subprocess.Popen(  # noqa: ASYNC220 - started at once
            [sys.executable, "-c", _FRONTEND, harness.server.endpoint], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout.readline() == b"open\n"
            process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(120):
                while harness.core.receiver.sessions:  # noqa: ASYNC110 - another thread's
                    await asyncio.sleep(0.05)
        finally:
            process.kill()
            process.communicate()


_FRONTEND = """
import asyncio, sys
from foveal_runtime.engine.testing.fake_frontend import FakeFrontend
from foveal_runtime.wire import codec
from foveal_runtime.wire.transport import ZmqDealer

async def main():
    link, fake = ZmqDealer(sys.argv[1], "f"), FakeFrontend("f")
    await link.connected()
    link.send(codec.encode_up(fake.hello()))
    fake.take(codec.decode_down(await link.recv()))
    assert fake.sender.is_up
    print("open", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_port_in_use_is_a_start_up_error():
    with engine() as harness:
        with pytest.raises(StartupError, match="http_port: cannot listen"):
            EngineServer(http_port=harness.server.health.port)
        server = EngineServer()
        with pytest.raises(StartupError, match="cannot listen"):
            server.run(harness.make_core, lambda: ZmqRouter(harness.server.endpoint))


async def test_a_link_that_breaks_is_noticed():
    with engine() as harness:
        client = Client(harness)
        await client.open()
        client.link.close()
        with pytest.raises(LinkDown):
            client.link.send([b"x"])
