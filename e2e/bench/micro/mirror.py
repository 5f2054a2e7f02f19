"""What the cache mirror and its messages cost a request: both ends, without a socket.

    python -m e2e.bench.micro.mirror

A repeated item: plan, stamp, encode, decode, admit, finish, with 100 and with 100,000 known items
(the cost must not grow). A new item adds its value's digest twice (made once, checked once).
Limits: an empty Python call for bookkeeping, one BLAKE3 pass for values, memcpy for messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec
import numpy as np

from e2e.bench.micro.common import best_seconds, call_seconds, copy_rate, hash_rate, show
from foveal_runtime.mirror.messages import Hello, Req
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.messages import EngineOutput, Outputs, RequestBody

VALUE_BYTES = [100_000, 1_350_000]
MIB = 1024**2


class Link:
    """A sender and a receiver with an open session, and values as media workers make them."""

    def __init__(self, capacity_bytes: int = 4096 * MIB) -> None:
        self.receiver = Receiver(ReceiverLimits(capacity_bytes=capacity_bytes))
        self.sender = Sender("f", frontend_boot=1)
        hello = self.sender.hello().message
        assert isinstance(hello, Hello)
        welcome = self.receiver.on_hello(hello)
        assert welcome is not None
        self.sender.on_down(welcome)
        self.number = itertools.count()

    def request(self, item: SendItem, value: SendValue | None, body: msgspec.Raw) -> None:
        """A whole request through both halves and the codec, finished at once."""
        rid = (f"r{next(self.number)}", 0)
        self.sender.plan_send([item])
        values = {} if value is None else {item.mm_hash: value}
        frames = codec.encode_up(self.sender.request(rid, [item], body, values))
        message = codec.decode_up(frames)
        opened = codec.open_values(message, frames)
        replies = self.receiver.on_message("f", message, opened)
        assert not replies
        (ready,) = self.receiver.take_ready()
        self.receiver.finish("f", ready.rid)
        down = self.receiver.down("f")
        if down is not None:
            self.sender.on_down(codec.decode_down(codec.encode_down(down)))
        self.sender.finished(rid)

    def learn(self, num_items: int) -> None:
        """Small items that both halves know."""
        data = pack_item(0, (1,), ((0, 1),), {"x": ("uint8", np.zeros(4, "u1"))})
        known = {number.to_bytes(32, "big"): Value(data) for number in range(num_items)}
        for mm_hash, value in known.items():
            self.receiver.store.insert_idle(mm_hash, len(data), value)
        self.sender.confirmed.update(dict.fromkeys(known, (len(data), None)))


def body(num_tokens: int) -> RequestBody:
    ids, wide = codec.pack_tokens(range(num_tokens))
    return RequestBody(ids, wide, ((1, 0),), SamplingParams(max_tokens=16))


def value_of(num_bytes: int) -> bytes:
    return bytes(pack_item(0, (1, 2), ((0, 2),), {"x": ("uint8", np.zeros(num_bytes, "u1"))}))


def repeated(num_known: int) -> None:
    link = Link()
    link.learn(num_known)
    data = value_of(1000)
    item = SendItem(b"x" * 32, len(data))
    raw = codec.encode_body(body(60))
    link.request(item, SendValue(data, codec.digest(data)), raw)
    seconds = best_seconds(lambda: link.request(item, None, raw))
    show(f"request with a repeated item, {num_known} items known", seconds,
         "empty call", call_seconds())  # fmt: skip
    print(f"{'':<58}{1 / seconds:>10.0f} requests a second, both ends in one process")


def new(num_bytes: int) -> None:
    """64 MiB of room: old values go as they would."""
    link = Link(capacity_bytes=64 * MIB)
    data = value_of(num_bytes)
    raw = codec.encode_body(body(60))
    names = itertools.count()

    def work() -> None:
        item = SendItem(next(names).to_bytes(32, "big"), len(data))
        link.request(item, SendValue(data, codec.digest(data)), raw)

    show(f"request with a new item of {num_bytes / 1000:.0f} kB", best_seconds(work),
         "two BLAKE3 passes", 2 * len(data) / hash_rate(len(data)))  # fmt: skip


def messages() -> None:
    """Encoding and decoding alone."""
    prompt = body(2000)
    raw = codec.encode_body(prompt)
    req = Req((1, 1), 1, ("a-request", 0), (), raw)
    frame = bytes(msgspec.msgpack.encode(req))
    outputs = Outputs(tuple(EngineOutput((f"r{i}", 0), (i,)) for i in range(32)))
    packed = codec.encode_outputs(outputs)
    cases: list[tuple[str, Callable[[], object], int]] = [
        ("encode the body of a 2,000-token prompt", lambda: codec.encode_body(prompt), len(raw)),
        ("decode it", lambda: codec.decode_body(raw, 1), len(raw)),
        ("decode and check its envelope", lambda: codec.decode_up([frame]), len(frame)),
        ("encode one step's outputs, 32 requests", lambda: codec.encode_outputs(outputs),
         len(packed)),
        ("decode them", lambda: codec.decode_outputs(packed), len(packed)),
    ]  # fmt: skip
    for title, work, num_bytes in cases:
        limit = max(num_bytes / copy_rate(), call_seconds())
        show(f"{title} ({num_bytes} B)", best_seconds(work), "copy or empty call", limit)


def main() -> None:
    print(f"copying: {copy_rate() / 1e9:.1f} GB/s, an empty call: {call_seconds() * 1e9:.0f} ns")
    for num_known in (100, 100_000):
        repeated(num_known)
    for num_bytes in VALUE_BYTES:
        new(num_bytes)
    messages()


if __name__ == "__main__":
    main()
