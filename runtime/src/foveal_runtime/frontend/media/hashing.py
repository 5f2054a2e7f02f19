"""Identity before work: the key of a media item, taken from its bytes as they arrived.

Called by input_processor and injection for every item of every request, before anything is decoded.
Never looks at URLs, host names or pixels: what is hashed is the encoded file, the processor that
will read it, the options of this item and the tenant's salt.

Framing: every node is `tag (1) | length (8, little-endian) | payload`, tag 0 none, 1 sequence, 2
map (entries sorted by key), 3 leaf; a leaf's payload opens with its type, so no two different
structures give the same bytes, however their parts are concatenated.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3

from foveal_runtime.frontend.protocol.body_text import BodyText, MediaText
from foveal_runtime.plan.errors import InvalidRequest, MediaInvalid, MediaTooLarge
from foveal_runtime.plan.media import MODALITIES, MMHash

_NONE, _SEQUENCE, _MAP, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"
_NO_BLANKS = dict.fromkeys(map(ord, " \t\r\n"))
_ESCAPED = {"%2B": "+", "%2F": "/", "%3D": "=", "%0D": "", "%0A": ""}
_MAX_DEPTH = 8
MAX_FRAMES = 1024
"""Of a video that comes as images; fewer are kept (`ModalityLimits.max_frames`)."""
_FRAMES_MAGIC = b"foveal frames 1\n"
_BASE64_MARK = ";base64,"
_MAX_TYPE_CHARS = 256
"""Of a data URL, within which its mark is looked for: what is behind may be megabytes."""
_PIECE_CHARS = 1 << 17
"""Of a text at a time: what is made of it is below `telemetry.memory.LARGE_BYTES`, so the kernel
does not map and clear memory for it. A multiple of four, as base64 needs."""

Scalar = None | bool | int | float | str | bytes
Value = Scalar | Sequence["Value"] | Mapping[str, "Value"]


def content_digest(data: bytes | memoryview) -> bytes:
    """32 bytes of BLAKE3 over the original encoded bytes."""
    return blake3(data).digest()


def frame(value: object, depth: int = 0) -> bytes:
    """The canonical bytes of a value made of None, scalars, sequences and string-keyed maps.

    Equal values give equal bytes whatever the order of their keys. Raises InvalidRequest for
    anything else and for nesting deeper than 8.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"options are nested deeper than {_MAX_DEPTH} levels")
    if value is None:
        return _node(_NONE, b"")
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise InvalidRequest("option names must be strings")
        parts = (_leaf(b"s", key.encode()) + frame(value[key], depth + 1) for key in sorted(value))
        return _node(_MAP, b"".join(parts))
    if isinstance(value, (list, tuple)):
        return _node(_SEQUENCE, b"".join(frame(part, depth + 1) for part in value))
    return _scalar(value)


def _scalar(value: object) -> bytes:
    if isinstance(value, bool):
        return _leaf(b"b", b"\x01" if value else b"\x00")
    if isinstance(value, int):
        return _leaf(b"i", str(value).encode())
    if isinstance(value, float):
        return _leaf(b"f", struct.pack("<d", value))
    if isinstance(value, str):
        return _leaf(b"s", value.encode())
    if isinstance(value, (bytes, memoryview)):
        return _leaf(b"y", bytes(value))
    raise InvalidRequest(f"options cannot hold a {type(value).__name__}")


def _node(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(8, "little") + payload


def _leaf(kind: bytes, payload: bytes) -> bytes:
    return _node(_LEAF, kind + payload)


def mm_hash(
    digest: bytes,
    *,
    modality: int,
    identity: bytes,
    options: Mapping[str, object],
    salt: bytes = b"",
) -> MMHash:
    """The key of one item: 32 bytes.

    `digest` is `content_digest` of the file, `identity` the processor's
    (`media.protocol.ProcessorInfo.identity`), `options` this item's processor options, `salt` the
    tenant's (b"" = shared between tenants).
    """
    return blake3(
        frame(["foveal.item", digest, MODALITIES[modality], identity, options, salt or None])
    ).digest()


def injected_hash(name: str, *, namespace: str, identity: bytes, salt: bytes = b"") -> MMHash:
    """The key of an item that an injector named: never equal to one taken from content."""
    return blake3(frame(["foveal.injected", namespace, name, identity, salt or None])).digest()


def embeds_hash(digest: bytes, *, identity: bytes, salt: bytes = b"") -> MMHash:
    """The key of an image that came as encoder outputs: nothing ties them to the image that they
    claim to be, so it never equals that of an image. `digest` is of the file that holds them."""
    return blake3(frame(["foveal.embeds", digest, identity, salt or None])).digest()


class DataUrl(msgspec.Struct, frozen=True):
    """A data: URL taken apart; `payload` is still encoded."""

    media_type: str
    is_base64: bool
    payload: MediaText


def parse_data_url(url: MediaText) -> DataUrl:
    """Splits `data:[type][;base64],payload`; a type's parameters may hold commas, as browsers write
    the codecs of what they record. Raises MediaInvalid."""
    mark = url[:_MAX_TYPE_CHARS].lower().find(_BASE64_MARK)
    comma = mark + len(_BASE64_MARK) - 1 if mark >= 0 else url.find(",")
    if not url.startswith("data:") or comma < 0:
        raise MediaInvalid("data URL has no comma; expected data:image/png;base64,<data>")
    parts = url[5:comma].split(";")
    is_base64 = parts[-1].strip().lower() == "base64"
    payload = url.behind(comma + 1) if isinstance(url, BodyText) else url[comma + 1 :]
    return DataUrl(parts[0].strip().lower(), is_base64, payload)


def decode_data_url(url: MediaText, *, max_bytes: int) -> bytes:
    """The file inside a data: URL. Raises MediaInvalid, or MediaTooLarge before decoding."""
    parsed = parse_data_url(url)
    if not parsed.is_base64:
        raise MediaInvalid("data URL is not base64; expected data:<type>;base64,<data>")
    check_text_size(parsed.payload, max_bytes)
    if parsed.media_type == "video/jpeg":
        data = pack_frames(str(parsed.payload))
    else:
        data = _from_base64(parsed.payload)
    if len(data) > max_bytes:
        raise MediaTooLarge(f"media has {len(data)} bytes, the limit is {max_bytes}")
    return data


def check_text_size(text: MediaText, max_bytes: int) -> None:
    """Of base64, without the line breaks and escapes that it may have. Raises MediaTooLarge."""
    chars, most = len(text), (max_bytes + 2) // 3 * 4 + 4
    if most < chars <= most + most // 8:
        chars -= sum(text.count(blank) for blank in " \t\r\n") + 2 * text.count("%")
    if chars // 4 * 3 > max_bytes + 2:
        raise MediaTooLarge(f"media has about {chars // 4 * 3} bytes, the limit is {max_bytes}")


def _from_base64(text: MediaText) -> bytes:
    """Line breaks and percent-escapes are left out where it is not to be read without that."""
    try:
        return _base64_pieces(text)
    except MediaInvalid:
        given = plain = str(text)
        if "%" in plain:
            for escaped, char in _ESCAPED.items():
                plain = plain.replace(escaped, char).replace(escaped.lower(), char)
        plain = plain.translate(_NO_BLANKS)
        if len(plain) == len(given):
            raise
        return _base64_pieces(plain)


def _base64_pieces(text: MediaText) -> bytes:
    """In pieces: other threads, the event loop's among them, have their turn between."""
    pieces = []
    try:
        for start in range(0, len(text), _PIECE_CHARS):
            piece = text[start : start + _PIECE_CHARS]
            if "-" in piece or "_" in piece:
                piece = piece.replace("-", "+").replace("_", "/")
            if start + _PIECE_CHARS >= len(text):
                piece += "=" * (-len(text) % 4)
            elif "=" in piece:
                raise MediaInvalid("data URL is not valid base64: padding before its end")
            pieces.append(_decoded(piece))
    except (binascii.Error, ValueError) as error:
        raise MediaInvalid(f"data URL is not valid base64: {error}") from error
    if not any(pieces):
        raise MediaInvalid("data URL is empty")
    return b"".join(pieces)


def _decoded(piece: str) -> bytes:
    """msgspec takes a fifth of the standard library's time, which says what is wrong, and takes
    what msgspec does not."""
    try:
        return msgspec.convert(piece, bytes)
    except msgspec.ValidationError:
        return base64.b64decode(piece, validate=True)


def pack_frames(payload: str) -> bytes:
    """The file that stands for `data:video/jpeg;base64,f1,f2,...`: each frame after its length."""
    num_frames = payload.count(",") + 1
    if num_frames > MAX_FRAMES:
        raise MediaTooLarge(f"the video has {num_frames} frames, the limit is {MAX_FRAMES}")
    out = bytearray(_FRAMES_MAGIC)
    for text in payload.split(","):
        frame = _from_base64(text.strip())
        out += struct.pack("<I", len(frame)) + frame
    return bytes(out)


def unpack_frames(data: bytes | memoryview) -> list[memoryview]:
    """The frames of such a file; none of any other. Raises MediaInvalid for one that is cut off."""
    view, at = memoryview(data), len(_FRAMES_MAGIC)
    if view[:at] != _FRAMES_MAGIC:
        return []
    frames = []
    while at < len(view):
        size = struct.unpack("<I", view[at : at + 4])[0] if at + 4 <= len(view) else 0
        at += 4 + size
        if not size or at > len(view):
            raise MediaInvalid("the video's frames are cut off")
        frames.append(view[at - size : at])
    return frames


class UrlTextMap:
    """Hash of a data URL's *text* → (content digest, file bytes): a repeated data URL is not even
    base64-decoded. Holds at most `max_entries` (oldest use goes first), about 200 B each."""

    def __init__(self, max_entries: int = 16384) -> None:
        self._max_entries = max_entries
        self._known: OrderedDict[bytes, tuple[bytes, int]] = OrderedDict()

    @staticmethod
    def key(url: MediaText, salt: bytes = b"") -> bytes:
        # sha1/sha256 have no use here: BLAKE3 reads 3 GB/s on one core.
        found = blake3(key=blake3(b"foveal.url" + salt).digest()) if salt else blake3()
        for start in range(0, len(url), _PIECE_CHARS):
            piece = slice(start, start + _PIECE_CHARS)
            if isinstance(url, BodyText):
                found.update(url.bytes_of(piece))
            else:
                found.update(url[piece].encode("utf-8", "surrogatepass"))
        return found.digest()

    def lookup(self, key: bytes) -> tuple[bytes, int] | None:
        found = self._known.get(key)
        if found is not None:
            self._known.move_to_end(key)
        return found

    def commit(self, key: bytes, digest: bytes, num_bytes: int) -> None:
        self._known[key] = (digest, num_bytes)
        self._known.move_to_end(key)
        while len(self._known) > self._max_entries:
            self._known.popitem(last=False)

    def __len__(self) -> int:
        return len(self._known)


def short_digest(*parts: bytes) -> bytes:
    """16 bytes of BLAKE3 over framed parts: namespaces and processor identities."""
    return blake3(frame(list(parts))).digest(length=16)
