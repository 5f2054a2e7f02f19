"""Frames cross real sockets: order, limits, breaks, CURVE. Loopback only."""

import asyncio
import threading
from collections import deque

import pytest
import zmq

from foveal_runtime.plan.config import CurveKeys
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire.transport import CURVE_BYTES, LinkDown, ZmqDealer, ZmqRouter

PLAIN = "tcp://127.0.0.1:0"


class EngineThread:
    """Echoes every message back until told to stop, as an engine's IO thread would poll."""

    def __init__(self, keys: CurveKeys | None = None, bind: str = PLAIN) -> None:
        self.router = ZmqRouter(bind, keys=keys)
        self.outgoing: deque[tuple[str, list[bytes]]] = deque()
        self.seen: list[str] = []
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for fid, frames in self.router.poll(5.0):
                self.seen.append(fid)
                self.router.send(fid, [bytes(frame) for frame in frames])
            while self.outgoing:
                self.router.send(*self.outgoing.popleft())
        self.router.close()

    def stop(self) -> None:
        self._stop = True
        self.router.wake()
        self._thread.join()


async def test_frames_come_back_in_order_and_bytes_are_counted():
    engine = EngineThread()
    link = ZmqDealer(engine.router.endpoint, "f0")
    try:
        await link.connected()
        value = bytes(range(256)) * 4096
        for i in range(50):
            link.send([b"%d" % i, value])
        for i in range(50):
            frames = await link.recv()
            assert bytes(frames[0]) == b"%d" % i
            assert frames[1] == value
        assert link.counters.bytes_sent == link.counters.bytes_received
        assert link.counters.messages_received == 50
        assert engine.router.counters.bytes_received == link.counters.bytes_sent
    finally:
        link.close()
        engine.stop()


async def test_another_thread_can_wake_the_poller():
    engine = EngineThread()
    link = ZmqDealer(engine.router.endpoint, "f0")
    try:
        await link.connected()
        link.send([b"hello"])
        await link.recv()
        engine.outgoing.append(("f0", [b"from the core"]))
        engine.router.wake()
        assert bytes((await link.recv())[0]) == b"from the core"
    finally:
        link.close()
        engine.stop()


async def test_sending_without_a_peer_ends_the_session_at_once():
    link = ZmqDealer("tcp://127.0.0.1:9", "f0")
    with pytest.raises(LinkDown) as caught:
        link.send([b"x"])
    assert caught.value.reason == "disconnected"
    link.close()
    with pytest.raises(LinkDown):
        await link.connected()


def test_waking_a_closed_router_is_harmless():
    """A core thread may wake the poller while that closes: once an OSError in the core."""
    router = ZmqRouter(PLAIN)
    router.close()
    router.wake()
    router.close()


def test_an_unknown_frontend_is_unreachable():
    router = ZmqRouter(PLAIN)
    with pytest.raises(LinkDown) as caught:
        router.send("nobody", [b"x"])
    assert caught.value.reason == "unreachable"
    router.close()


async def test_a_restarted_engine_is_a_break_and_then_a_new_connection():
    first = EngineThread()
    link = ZmqDealer(first.router.endpoint, "f0")
    await link.connected()
    first.stop()
    with pytest.raises(LinkDown) as caught:
        await link.recv()
    assert caught.value.reason == "disconnected"
    second = EngineThread(bind=first.router.endpoint)
    try:
        await link.connected()
        link.send([b"again"])
        assert bytes((await link.recv())[0]) == b"again"
    finally:
        link.close()
        second.stop()


async def test_a_frontend_that_comes_back_takes_its_name_over():
    """ROUTER_HANDOVER: without it the second socket of a restarted frontend is ignored."""
    engine = EngineThread()
    old = ZmqDealer(engine.router.endpoint, "f0")
    await old.connected()
    old.send([b"old"])
    await old.recv()
    new = ZmqDealer(engine.router.endpoint, "f0")
    try:
        await new.connected()
        new.send([b"new"])
        assert bytes((await new.recv())[0]) == b"new"
    finally:
        old.close()
        new.close()
        engine.stop()


def key_pairs(directory):
    """The files of a server's and a client's new keys."""
    directory.mkdir(exist_ok=True)
    paths = {}
    for role in ("server", "client"):
        for kind, key in zip(("public", "secret"), zmq.curve_keypair(), strict=True):
            path = directory / f"{role}.{kind}"
            path.write_bytes(key)
            paths[f"{role}_{kind}_file"] = str(path)
    return CurveKeys(**paths)


async def test_curve_lets_known_clients_in_and_nobody_else(tmp_path):
    ours = key_pairs(tmp_path / "ours")
    stranger = key_pairs(tmp_path / "stranger")
    engine = EngineThread(keys=ours)
    known = ZmqDealer(engine.router.endpoint, "f0", keys=ours)
    forged = CurveKeys(
        server_public_file=ours.server_public_file,
        client_public_file=stranger.client_public_file,
        client_secret_file=stranger.client_secret_file,
    )
    unknown = ZmqDealer(engine.router.endpoint, "f1", keys=forged)
    plain = ZmqDealer(engine.router.endpoint, "f2")
    try:
        await known.connected()
        known.send([b"secret"])
        assert bytes((await known.recv())[0]) == b"secret"
        with pytest.raises(LinkDown) as caught:
            await unknown.recv()
        assert caught.value.reason == "handshake_failed"
        with pytest.raises(LinkDown):
            plain.send([b"x"])
        assert set(engine.seen) == {"f0"}
    finally:
        for link in (known, unknown, plain):
            link.close()
        engine.stop()


async def test_the_largest_value_fits_an_encrypted_frame(tmp_path):
    """What CURVE adds counts against the limit: the largest value that is let through broke the
    link."""
    keys = key_pairs(tmp_path)
    for slack in (0, CURVE_BYTES):
        router = ZmqRouter(PLAIN, keys=keys, max_frame_bytes=100_000 + slack)
        link = ZmqDealer(router.endpoint, "f0", keys=keys)
        try:
            await link.connected()
            link.send([bytes(100_000)])
            if slack:
                [(_, (frame,))] = router.poll(10)
                assert len(frame) == 100_000
            else:
                with pytest.raises(LinkDown):
                    await link.recv()
        finally:
            link.close()
            router.close()


def test_errors_of_key_files_name_the_field(tmp_path):
    keys = key_pairs(tmp_path)
    (tmp_path / "short").write_text("abc")
    with pytest.raises(StartupError, match=r"server_secret_file.*Z85"):
        ZmqRouter(PLAIN, keys=CurveKeys(
            server_secret_file=str(tmp_path / "short"), client_public_file=keys.client_public_file
        ))  # fmt: skip
    with pytest.raises(StartupError, match="client_public_file is not set"):
        ZmqRouter(PLAIN, keys=CurveKeys(server_secret_file=keys.server_secret_file))


def test_plain_transport_stays_on_loopback():
    with pytest.raises(StartupError, match="not on loopback"):
        ZmqRouter("tcp://0.0.0.0:0")


def test_a_taken_port_is_a_startup_error():
    router = ZmqRouter(PLAIN)
    with pytest.raises(StartupError, match="cannot listen"):
        ZmqRouter(router.endpoint)
    router.close()


async def test_a_frontend_that_does_not_read_is_given_up():
    """Finite queues: the engine neither waits for a stuck frontend nor piles up its messages."""
    router = ZmqRouter(PLAIN, max_queued=4)
    link = ZmqDealer(router.endpoint, "f0", max_queued=4)
    try:
        await link.connected()
        link.send([b"hello"])
        assert [fid for fid, _ in router.poll(10)] == ["f0"]

        def send_much() -> None:
            for _ in range(500):  # the loop does not run meanwhile: nobody reads
                router.send("f0", [bytes(2**20)])

        with pytest.raises(LinkDown) as caught:
            send_much()
        assert caught.value.reason == "full"
    finally:
        link.close()
        router.close()


async def test_frames_above_the_limit_break_the_link():
    router = ZmqRouter(PLAIN, max_frame_bytes=1000)
    link = ZmqDealer(router.endpoint, "f0")
    try:
        await link.connected()
        link.send([b"x" * 1001])
        with pytest.raises(LinkDown) as caught:
            await link.recv()
        assert caught.value.reason == "disconnected"
        assert router.poll(0) == []
    finally:
        link.close()
        router.close()


async def test_closing_wakes_a_waiting_receiver():
    link = ZmqDealer("tcp://127.0.0.1:9", "f0")
    waiter = asyncio.ensure_future(link.recv())
    await asyncio.sleep(0)
    link.close()
    with pytest.raises(LinkDown):
        await waiter
