"""The bytes of every message between frontend and engine: msgpack envelopes and value frames.

Used by the engine client and the engine server around a transport. A message is a list of frames:
frame 0 is the msgpack envelope, frames 1.. are item values, received without a copy. The schema is
closed and everything from a peer is checked here, so that the packages behind see only well-formed
messages; anything else raises DecodeError. Never evaluates, imports or unpickles.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec
from blake3 import blake3

from foveal_runtime.mirror.messages import (
    Abort,
    Control,
    DownMessage,
    Fill,
    Hello,
    InlineValue,
    ItemRef,
    NoFill,
    Put,
    Refusals,
    Refuse,
    Req,
    SharedValue,
    Up,
    ValueRef,
)  # fmt: skip
from foveal_runtime.mirror.refusals import MAX_REFUSALS
from foveal_runtime.mirror.sender import Sending
from foveal_runtime.mirror.store import Buffer, Value
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire.item import BadItem, meta_of, read_header
from foveal_runtime.wire.messages import EngineInfo, Outputs, RequestBody

HASH_BYTES = 32
DIGEST_BYTES = 8
KEY_BYTES = 16
MAX_SECONDS = 1e11
MAX_ENVELOPE_BYTES = 64 * 1024**2
MAX_ITEMS = 4096
MAX_BINDS = 4096
MAX_ID_CHARS = 256
MAX_U32 = 2**32 - 1
MAX_U64 = 2**64 - 1

SharedOpener = Callable[[SharedValue, MMHash], Buffer | None]
"""Maps a shared-memory value read-only; None when it is not there (any more)."""


class DecodeError(ValueError):
    """A peer sent something that is no message of this protocol: end its session."""


class BadValue(DecodeError):
    """A value's bytes are not what its reference says."""


# ---- envelopes ---------------------------------------------------------------------------------
def encode_up(sending: Sending) -> list[Buffer]:
    """Frames of a message to an engine. Value frames are the caller's buffers, not copied."""
    return [_ENCODER.encode(sending.message), *sending.frames]


def decode_up(frames: Sequence[Buffer]) -> Up:
    """A message from a frontend, checked field by field. Raises DecodeError.

    The message and `frames` belong together: `open_values` finds the values in the frames.
    """
    message = _decode(_UP, frames)
    _check_sid(message.sid)
    num_values = 0
    if isinstance(message, Req | Put):
        num_values = _check_items(message.items, len(frames))
        _require(len(message.binds) <= MAX_BINDS, "too many binds")
        for alias, mm_hash in message.binds:
            _require(len(alias) == HASH_BYTES, "alias length")
            _check_hash(mm_hash)
    elif isinstance(message, Fill):
        num_values = _check_value(message.value, message.size_bytes, len(frames))
        _check_size(message.size_bytes)
        _check_hash(message.mm_hash)
    elif isinstance(message, NoFill):
        _check_hash(message.mm_hash)
    elif isinstance(message, Hello):
        _require(0 < len(message.frontend_id) <= MAX_ID_CHARS, "frontend id length")
        _require(len(message.namespace) <= 64 and len(message.node) <= MAX_ID_CHARS, "hello")
    elif isinstance(message, Control):
        _require(len(message.action) <= 64, "action length")
        _require(0 <= message.value <= MAX_U64, "value")
        _require(len(message.lora) <= 2 and all(len(t) <= 4096 for t in message.lora), "adapter")
    elif isinstance(message, Refuse):
        _check_refusals(message.refusals)
    if isinstance(message, Req | Abort):
        name, attempt = message.rid
        _require(0 < len(name) <= MAX_ID_CHARS, "request id length")
        _require(0 <= attempt <= MAX_U32, "attempt")
    if isinstance(message, Req | Put | Fill | NoFill | Abort | Control | Refuse):
        _require(0 < message.n <= MAX_U64, "n")
    _require(len(frames) == 1 + num_values, "frames that nothing refers to")
    return message


def encode_down(message: DownMessage) -> list[Buffer]:
    return [_ENCODER.encode(message)]


def decode_down(frames: Sequence[Buffer]) -> DownMessage:
    """A message from an engine. Raises DecodeError."""
    message = _decode(_DOWN, frames)
    _require(len(frames) == 1, "frames that nothing refers to")
    _check_sid(message.sid)
    return message


# ---- bodies ------------------------------------------------------------------------------------
def encode_body(body: RequestBody) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(body))


def decode_body(raw: msgspec.Raw, num_items: int) -> RequestBody:
    """The body of a REQ with `num_items` items; placements point into it. Raises DecodeError."""
    body = _decode_raw(_BODY, raw)
    width = 4 if body.wide else 2
    _require(len(body.token_ids) % width == 0, "token ids are cut")
    _require(len(body.emitted) % width == 0, "emitted ids are cut")
    _require(len(body.key) in (0, KEY_BYTES), "length of the key")
    _require(body.lora is None or len(body.lora.digest) <= HASH_BYTES, "adapter")
    num_tokens, last = len(body.token_ids) // width, -1
    for position, item in body.placements:
        _require(last < position < num_tokens, "placement outside the prompt or out of order")
        _require(0 <= item < num_items, "placement of an item that is not there")
        last = position
    return body


def encode_outputs(outputs: Outputs) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(outputs))


def decode_outputs(raw: msgspec.Raw) -> Outputs:
    return _decode_raw(_OUTPUTS, raw)


def encode_info(info: EngineInfo) -> msgspec.Raw:
    return msgspec.Raw(_ENCODER.encode(info))


def decode_info(raw: msgspec.Raw) -> EngineInfo:
    return _decode_raw(_INFO, raw)


def pack_tokens(token_ids: Iterable[int], *, wide: bool | None = None) -> tuple[bytes, bool]:
    """Little-endian ids and whether they are u32: u16 when every id fits, unless `wide` is set."""
    ids = list(token_ids)
    if wide is None:
        wide = bool(ids) and max(ids) > 0xFFFF
    packed = array("I" if wide else "H", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes(), wide


def unpack_tokens(data: bytes, wide: bool) -> list[int]:
    """The ids again. Raises DecodeError when the length is no whole number of ids."""
    packed = array("I" if wide else "H")
    _require(len(data) % packed.itemsize == 0, "token ids are cut")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


# ---- values ------------------------------------------------------------------------------------
def digest(data: Buffer) -> bytes:
    """8 bytes of BLAKE3: guards a value against damage on the way, not against forgery."""
    return blake3(data).digest(DIGEST_BYTES)


def open_values(
    message: Up, frames: Sequence[Buffer], open_shared: SharedOpener | None = None
) -> dict[MMHash, Value]:
    """The values that a decoded message carries: size and digest checked, item header read.

    A shared value that cannot be opened is left out (the receiver then asks for it). Raises
    BadValue when bytes differ from their reference or are no item.
    """
    values: dict[MMHash, Value] = {}
    if isinstance(message, Req | Put):
        for item in message.items:
            if item.value is not None:
                _open(values, item.mm_hash, item.size_bytes, item.value, frames, open_shared)
    elif isinstance(message, Fill):
        _open(
            values, message.mm_hash, message.size_bytes, message.value, frames, open_shared
        )  # fmt: skip
    return values


def _open(
    values: dict[MMHash, Value],
    mm_hash: MMHash,
    size_bytes: int,
    ref: ValueRef,
    frames: Sequence[Buffer],
    open_shared: SharedOpener | None,
) -> None:
    if isinstance(ref, InlineValue):
        data: Buffer | None = frames[ref.frame]
        if data is not None and (len(data) != size_bytes or digest(data) != ref.digest):
            raise BadValue("an inline value is damaged")
    else:
        data = open_shared(ref, mm_hash) if open_shared is not None else None
    if data is None:
        return
    view = memoryview(data).toreadonly()
    try:
        meta = meta_of(read_header(view))
    except BadItem as error:
        raise BadValue(str(error)) from error
    values[mm_hash] = Value(view, meta, ref.digest)


# ---- checks ------------------------------------------------------------------------------------
def _check_items(items: tuple[ItemRef, ...], num_frames: int) -> int:
    """Returns the number of inline values; each names a frame of its own, in order."""
    _require(len(items) <= MAX_ITEMS, "too many items")
    _require(len({item.mm_hash for item in items}) == len(items), "items are not distinct")
    num_values = 0
    for item in items:
        _check_hash(item.mm_hash)
        _check_size(item.size_bytes)
        _require(item.source is None or len(item.source) <= MAX_ID_CHARS, "source length")
        if item.value is not None:
            frame = num_values + 1
            num_values += _check_value(item.value, item.size_bytes, num_frames, frame)
    return num_values


def _check_value(ref: ValueRef, size_bytes: int, num_frames: int, frame: int = 1) -> int:
    _require(len(ref.digest) == DIGEST_BYTES, "digest length")
    if isinstance(ref, InlineValue):
        _require(ref.frame == frame < num_frames, "frame number")
        return 1
    _require(ref.length == size_bytes, "size of a shared value")
    _require(0 < len(ref.name) <= MAX_ID_CHARS, "name of a shared value")
    return 0


def _check_refusals(told: Refusals) -> None:
    """Times that no clock shows would never expire, or hide what others tell."""
    _require(len(told.entries) <= MAX_REFUSALS, "too many refusals")
    times = [told.cleared_at, *(at for _, at, _ in told.entries)]
    _require(all(0 <= at < MAX_SECONDS for at in times), "time of a refusal")
    for key, _, shape in told.entries:
        _require(len(key) == KEY_BYTES and len(shape) <= MAX_ID_CHARS, "refusal")


def _check_hash(mm_hash: bytes) -> None:
    _require(len(mm_hash) == HASH_BYTES, "hash length")


def _check_size(size_bytes: int) -> None:
    _require(0 < size_bytes <= MAX_U64, "item size")


def _check_sid(sid: tuple[int, int]) -> None:
    _require(0 <= sid[0] <= MAX_U64 and 0 <= sid[1] <= MAX_U32, "session id")


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise DecodeError(f"malformed message: {what}")


_T = TypeVar("_T")


def _decode(decoder: msgspec.msgpack.Decoder[_T], frames: Sequence[Buffer]) -> _T:
    _require(len(frames) > 0, "no frames")
    _require(len(frames[0]) <= MAX_ENVELOPE_BYTES, "envelope size")
    try:
        return decoder.decode(frames[0])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"malformed message: {error}") from error


def _decode_raw(decoder: msgspec.msgpack.Decoder[_T], raw: msgspec.Raw) -> _T:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"malformed body: {error}") from error


_ENCODER = msgspec.msgpack.Encoder()
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)
_DOWN: msgspec.msgpack.Decoder[DownMessage] = msgspec.msgpack.Decoder(DownMessage)
_BODY = msgspec.msgpack.Decoder(RequestBody)
_OUTPUTS = msgspec.msgpack.Decoder(Outputs)
_INFO = msgspec.msgpack.Decoder(EngineInfo)
