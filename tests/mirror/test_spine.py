"""A frontend loop and an engine thread over a real transport: values arrive, repeats are hashes,
an engine restart re-issues what was under way."""

import asyncio
import threading

import msgspec
import numpy as np
import pytest

from foveal_runtime.mirror.messages import NIL
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.testing.inprocess import InProcessHub
from foveal_runtime.wire.transport import (
    EngineTransport,
    FrontendTransport,
    LinkDown,
    ZmqDealer,
    ZmqRouter,
)


def value(index: int) -> bytes:
    pixels = np.full((3, 64, 64), index, np.float32)
    return pack_item(0, (1, 2, 3), ((1, 1),), {"pixels": ("float32", pixels)})


class Engine:
    """The smallest engine: answers a request with the sizes of its items."""

    def __init__(self, transport: EngineTransport, boot: int = 1) -> None:
        self.transport = transport
        self.receiver = Receiver(ReceiverLimits(capacity_bytes=2**20), boot=boot)
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop:
            for fid, frames in self.transport.poll(5.0):
                message = codec.decode_up(frames)
                values = codec.open_values(message, frames)
                for answer in self.receiver.on_message(fid, message, values):
                    self.transport.send(fid, codec.encode_down(answer))
            for ready in self.receiver.take_ready():
                sizes = [len(v.data) for v in ready.items.values()]
                self.receiver.finish(ready.fid, ready.rid)
                raw = msgspec.Raw(msgspec.msgpack.encode([ready.rid, sizes]))
                self._send(ready.fid, raw)
            for fid in list(self.receiver.sessions):
                if self.receiver.wants_immediate_flush(fid):
                    self._send(fid, None)
        self.transport.close()

    def _send(self, fid: str, raw: msgspec.Raw | None) -> None:
        down = self.receiver.down(fid, raw)
        if down is None:
            return
        try:
            self.transport.send(fid, codec.encode_down(down))
        except LinkDown as error:
            self.receiver.on_session_lost(fid, error.reason)

    def stop(self) -> None:
        self._stop = True
        self.transport.wake()
        self._thread.join()


class Client:
    """The smallest frontend link."""

    def __init__(self, link: FrontendTransport) -> None:
        self.link = link
        self.sender = Sender("f0", frontend_boot=1)
        self.lost: list = []

    async def open(self) -> None:
        await self.link.connected()
        self.link.send(codec.encode_up(self.sender.hello()))
        while not self.sender.is_up:
            self.sender.on_down(codec.decode_down(await self.link.recv()))

    async def ask(self, name: str, indexes: list[int]) -> list[int]:
        values = {i.to_bytes(32, "big"): value(i) for i in indexes}
        items = [SendItem(h, len(v)) for h, v in values.items()]
        ready = {h: SendValue(v, codec.digest(v)) for h, v in values.items()}
        sending = self.sender.request((name, 1), items, NIL, ready)
        self.link.send(codec.encode_up(sending))
        while True:
            event = self.sender.on_down(codec.decode_down(await self.link.recv()))
            assert not event.session_over
            for need in event.needs:
                self.link.send(codec.encode_up(self.sender.fill(need, ready[need])))
            if event.outputs is not None:
                (rid, _), sizes = msgspec.msgpack.decode(event.outputs)
                self.sender.finished((rid, 1))
                assert rid == name
                return sizes


@pytest.fixture(params=["zmq", "inprocess"])
async def pair(request):
    if request.param == "zmq":
        transport = ZmqRouter("tcp://127.0.0.1:0")
        link = ZmqDealer(transport.endpoint, "f0")
    else:
        transport = InProcessHub()
        link = transport.connect("f0")
    engine = Engine(transport)
    client = Client(link)
    await client.open()
    yield client, engine
    link.close()
    engine.stop()


async def test_values_cross_once(pair):
    client, engine = pair
    size = len(value(1))
    assert await client.ask("a", [1, 2]) == [size, size]
    sent = client.link.counters.bytes_sent
    assert sent > 2 * size
    assert await client.ask("b", [2, 1]) == [size, size]
    assert client.link.counters.bytes_sent - sent < 300
    assert engine.receiver.stats.num_hits == 2


async def test_evicted_values_are_asked_for(pair):
    client, engine = pair
    for index in range(40):  # forty times 48 KB in 1 MiB
        await client.ask(f"r{index}", [index])
    client.sender.optimistic.clear()
    client.sender.confirmed[(1).to_bytes(32, "big")] = (len(value(1)), None)  # a stale hint
    await client.ask("stale", [1])
    assert engine.receiver.stats.num_needs_stale == 1


async def test_an_engine_restart_reissues(tmp_path):
    endpoint = f"ipc://{tmp_path}/engine"
    first = Engine(ZmqRouter(endpoint))
    client = Client(ZmqDealer(endpoint, "f0"))
    await client.open()
    await client.ask("a", [1])
    first.stop()
    with pytest.raises(LinkDown):
        await asyncio.wait_for(client.link.recv(), 30)
    client.sender.unfinished[("under way", 1)] = ()
    assert client.sender.end_session("disconnected") == [("under way", 1)]
    second = Engine(ZmqRouter(endpoint), boot=2)
    try:
        await client.open()
        assert not client.sender.believes((1).to_bytes(32, "big"))
        assert await client.ask("b", [1]) == [len(value(1))]
    finally:
        client.link.close()
        second.stop()
