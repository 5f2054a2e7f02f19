"""What crosses a process is well-formed or refused, and small."""

import random

import msgspec
import numpy as np
import pytest

from foveal_runtime.mirror.messages import (
    Abort,
    Announced,
    Bye,
    Control,
    Down,
    EngineHeartbeat,
    Fill,
    Heartbeat,
    Hello,
    InlineValue,
    ItemRef,
    MirrorNote,
    NoFill,
    Put,
    Req,
    SharedValue,
    Welcome,
)
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender, Sending, SendItem, SendValue
from foveal_runtime.plan.media import ItemMeta
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.messages import EngineInfo, EngineOutput, Outputs, RequestBody

HASH = bytes(range(32))
OTHER = bytes(range(1, 33))
PIXELS = {"pixel_values": ("float32", np.ones((3, 8, 8), np.float32))}
VALUE = pack_item(0, (5, 6, 6, 6, 7), ((1, 3),), PIXELS)
BODY = RequestBody(
    *codec.pack_tokens(range(40)), placements=((3, 0), (9, 1)), sampling=SamplingParams(16)
)


def inline(frame: int = 1) -> InlineValue:
    return InlineValue(frame, codec.digest(VALUE))


UP = [
    Sending(Hello(1, "f0", (2**64 - 1, 1), b"n" * 16, "node"), []),
    Sending(
        Req(
            (1, 1),
            1,
            ("chat-1", 1),
            (ItemRef(HASH, len(VALUE), inline()), ItemRef(OTHER, 9, None, "f1")),
            codec.encode_body(BODY),
            ((OTHER, HASH),),
        ),
        [VALUE],
    ),
    Sending(Put((1, 1), 2, (ItemRef(HASH, 9, SharedValue("1/2-ab", 9, b"8" * 8)),)), []),
    Sending(Fill((1, 1), 3, HASH, len(VALUE), inline()), [VALUE]),
    Sending(NoFill((1, 1), 4, HASH), []),
    Sending(Abort((1, 1), 5, ("chat-1", 1)), []),
    Sending(Control((1, 1), 6, "resize_ipc", 2**40), []),
    Sending(Heartbeat((1, 1)), []),
]
ANNOUNCED = Announced(HASH, 5_000_000, ItemMeta(0, 2227, 2197))
DOWN = [
    Welcome(
        (1, 1), 1, 7, 1, 2, 3, "node", (ANNOUNCED,), ((OTHER, HASH),),
        codec.encode_info(EngineInfo("e0", "m", "r", 10, 2)),
    ),
    Down((1, 1), 2, MirrorNote(3, (ANNOUNCED,), (OTHER,), (HASH,), ((("a", 1), "code"),))),
    Down((1, 1), 3, None, codec.encode_outputs(Outputs((EngineOutput(("a", 1), (5, 6)),)))),
    Bye((1, 1), "gap"),
    EngineHeartbeat((1, 1), 5, True),
]  # fmt: skip


@pytest.mark.parametrize("sending", UP, ids=lambda s: type(s.message).__name__)
def test_up_round_trip(sending):
    frames = codec.encode_up(sending)
    message = codec.decode_up([memoryview(bytes(f)) for f in frames])
    assert message == sending.message


@pytest.mark.parametrize("message", DOWN, ids=lambda m: type(m).__name__)
def test_down_round_trip(message):
    assert codec.decode_down(codec.encode_down(message)) == message


def test_bodies_round_trip():
    req = codec.decode_up(codec.encode_up(UP[1]))
    body = codec.decode_body(req.body, 2)
    assert body == BODY
    assert codec.unpack_tokens(body.token_ids, body.wide) == list(range(40))
    outputs = codec.decode_outputs(codec.decode_down(codec.encode_down(DOWN[2])).outputs)
    assert outputs.outputs[0].token_ids == (5, 6)
    info = codec.decode_info(codec.decode_down(codec.encode_down(DOWN[0])).info)
    assert info.max_model_len == 10


def test_tokens_take_two_bytes_until_they_need_four():
    assert codec.pack_tokens([1, 65535]) == (b"\x01\x00\xff\xff", False)
    packed, wide = codec.pack_tokens([1, 65536])
    assert (len(packed), wide) == (8, True)
    assert codec.unpack_tokens(packed, True) == [1, 65536]
    assert codec.pack_tokens([]) == (b"", False)
    with pytest.raises(codec.DecodeError):
        codec.unpack_tokens(b"abc", False)


def test_values_are_received_without_a_copy():
    frames = codec.encode_up(UP[1])
    message = codec.decode_up(frames)
    values = codec.open_values(message, frames)
    assert np.shares_memory(
        np.frombuffer(values[HASH].data, np.uint8), np.frombuffer(frames[1], np.uint8)
    )
    assert values[HASH].meta == ItemMeta(0, 5, 3)
    assert values[HASH].data.readonly


def test_damaged_values_are_refused():
    frames = codec.encode_up(UP[3])
    message = codec.decode_up(frames)
    for damaged in (VALUE[:-1] + b"!", VALUE[:-1], b""):
        with pytest.raises(codec.BadValue):
            codec.open_values(message, [frames[0], damaged])
    junk = b"no item at all"
    fill = Fill((1, 1), 1, HASH, len(junk), InlineValue(1, codec.digest(junk)))
    with pytest.raises(codec.BadValue):
        codec.open_values(fill, [b"", junk])


def test_shared_values_that_are_gone_are_left_out():
    put = UP[2].message
    assert codec.open_values(put, [b""]) == {}
    assert codec.open_values(put, [b""], lambda ref, h: None) == {}
    opened = codec.open_values(put, [b""], lambda ref, h: VALUE)
    assert bytes(opened[HASH].data) == VALUE


def _req(**changes: object) -> Sending:
    return Sending(msgspec.structs.replace(UP[1].message, **changes), [VALUE])


@pytest.mark.parametrize(
    "sending",
    [
        _req(items=(ItemRef(HASH, 5, inline()), ItemRef(HASH, 5))),
        _req(items=(ItemRef(b"short", 5, inline()),)),
        _req(items=(ItemRef(HASH, 5, inline(2)),)),
        _req(items=(ItemRef(HASH, 5, inline(0)),)),
        _req(items=(ItemRef(HASH, 5),)),  # a frame that nothing refers to
        _req(items=(ItemRef(HASH, 0, inline()),)),
        _req(items=(ItemRef(HASH, -1, inline()),)),
        _req(items=(ItemRef(HASH, 5, InlineValue(1, b"short")),)),
        _req(items=(ItemRef(HASH, 5, inline()), ItemRef(OTHER, 5, inline()))),
        _req(items=(ItemRef(HASH, 5, inline(), "x" * 257),)),
        _req(rid=("", 1)),
        _req(rid=("x" * 257, 1)),
        _req(rid=("a", -1)),
        _req(n=0),
        _req(sid=(-1, 0)),
        _req(binds=((b"short", HASH),)),
        Sending(Put((1, 1), 2, (ItemRef(HASH, 9, SharedValue("", 9, b"8" * 8)),)), []),
        Sending(Put((1, 1), 2, (ItemRef(HASH, 9, SharedValue("a", 8, b"8" * 8)),)), []),
        Sending(Heartbeat((1, 1)), [b"stray"]),
        Sending(Hello(1, "", (1, 1), b"", ""), []),
    ],
)
def test_malformed_messages_are_refused(sending):
    with pytest.raises(codec.DecodeError):
        codec.decode_up(codec.encode_up(sending))


@pytest.mark.parametrize(
    "body",
    [
        msgspec.structs.replace(BODY, token_ids=b"abc"),
        msgspec.structs.replace(BODY, emitted=b"a"),
        msgspec.structs.replace(BODY, placements=((40, 0),)),
        msgspec.structs.replace(BODY, placements=((3, 2),)),
        msgspec.structs.replace(BODY, placements=((3, 0), (3, 1))),
        msgspec.structs.replace(BODY, placements=((-1, 0),)),
    ],
)
def test_malformed_bodies_are_refused(body):
    with pytest.raises(codec.DecodeError):
        codec.decode_body(codec.encode_body(body), 2)


def _mutate(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        kind = rng.randrange(4)
        at = rng.randrange(len(damaged) + 1)
        if kind == 0 and damaged:
            damaged[at % len(damaged)] = rng.randrange(256)
        elif kind == 1:
            del damaged[at:]
        elif kind == 2:
            damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
        else:
            del damaged[at : at + rng.randrange(1, 5)]
    return bytes(damaged)


def test_a_hundred_thousand_damaged_frames_crash_nothing():
    """Whatever arrives is a message or a DecodeError; never another exception."""
    seed = 20
    print("seed", seed)
    rng = random.Random(seed)
    ups = [[bytes(frame) for frame in codec.encode_up(sending)] for sending in UP]
    downs = [codec.encode_down(message) for message in DOWN]
    refused = 0
    for _ in range(70_000):
        frames = list(rng.choice(ups))
        which = rng.randrange(len(frames))
        frames[which] = _mutate(rng, frames[which])
        try:
            message = codec.decode_up(frames)
            codec.open_values(message, frames)
            if isinstance(message, Req):
                codec.decode_body(message.body, len(message.items))
        except codec.DecodeError:
            refused += 1
    for _ in range(30_000):
        frames = [_mutate(rng, rng.choice(downs)[0])]
        try:
            message = codec.decode_down(frames)
            if isinstance(message, Down):
                codec.decode_outputs(message.outputs)
            elif isinstance(message, Welcome):
                codec.decode_info(message.info)
        except codec.DecodeError:
            refused += 1
    assert refused > 50_000


def test_a_repeated_image_adds_at_most_128_bytes_both_ways():
    """The same prompt with and without its image, after the image is known: everything that
    crosses, notes and acknowledgements included."""

    def cost(with_image: bool) -> int:
        sender = Sender("frontend-0", frontend_boot=2**63)
        receiver = Receiver(ReceiverLimits(capacity_bytes=2**32))
        total = 0

        def up(sending: Sending) -> None:
            nonlocal total
            frames = [memoryview(bytes(f)) for f in codec.encode_up(sending)]
            total += sum(len(frame) for frame in frames)
            message = codec.decode_up(frames)
            for answer in receiver.on_message(
                "frontend-0", message, codec.open_values(message, frames)
            ):
                down(answer)

        def down(message) -> None:
            nonlocal total
            frames = codec.encode_down(message)
            total += len(frames[0])
            sender.on_down(codec.decode_down(frames))

        def one(name: str, image: bool) -> int:
            nonlocal total
            total = 0
            items = [SendItem(HASH, len(VALUE))] if image else []
            values = {HASH: SendValue(VALUE, codec.digest(VALUE))}
            ids = list(range(1000, 1040)) + ([151655] if image else [])
            body = RequestBody(
                *codec.pack_tokens(ids, wide=True), ((40, 0),) if image else (), SamplingParams(16)
            )
            rid = (name, 1)
            up(sender.request(rid, items, codec.encode_body(body), values))
            receiver.take_ready()
            for _ in range(3):
                outputs = Outputs((EngineOutput(rid, (7,)),))
                down(receiver.down("frontend-0", codec.encode_outputs(outputs)))
            receiver.finish("frontend-0", rid)
            last = receiver.down("frontend-0")
            if last is not None:
                down(last)
            return total

        up(sender.hello())
        one("chatcmpl-first", True)
        return one("chatcmpl-second", with_image)

    assert cost(True) - cost(False) <= 128
    print("a repeated image adds", cost(True) - cost(False), "bytes")
