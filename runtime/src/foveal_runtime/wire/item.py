"""The bytes of one processed media item: what caches store, hash sizes count and engines read.

Made by frontend media workers (`pack_item`), read by engine/ (metadata, splicing) and model/
(tensors as views, no copy). The size of an item is the length of these bytes, on both sides, by
definition. Bytes come from peers: every offset is checked before it is used.

Layout: magic (4) | header length u32 | msgpack ItemHeader | padding | buffers, each 64-aligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from foveal_runtime.plan.media import MODALITIES, ItemMeta
from foveal_runtime.wire.palette import (
    BYTES,
    INTEGERS,
    Codebook,
    Palette,
    Stored,
    encode_integers,
    expand,
)

MAGIC = b"FMI1"
ALIGN = 64
EMBEDS = "image_embeds"
"""The field of an item that comes as its encoder's outputs: (1, outputs, width of all levels)."""
ITEM_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip


class BadItem(ValueError):
    """The bytes are not a well-formed item."""


class FieldInfo(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: offset counts from the start of the buffer section. `dtype` and `shape` are those
    of the tensor, `num_bytes` what is stored: less than the tensor's when it has a `palette`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    palette: Palette | None = None


class ItemHeader(msgspec.Struct, frozen=True, array_like=True):
    """All of an item but its tensors.

    Attributes:
        modality: index into plan.media.MODALITIES.
        replacement: token ids that the item's one placeholder token expands to.
        embed_runs: (start, length) runs inside `replacement` that take encoder outputs.
        fields: the processor's tensors for this item alone, as its model names them.
    """

    modality: int
    replacement: tuple[int, ...]
    embed_runs: tuple[tuple[int, int], ...]
    fields: tuple[FieldInfo, ...]


class Field:
    """A tensor of an item as stored bytes: `data` is a view, `dtype` a torch name ("bfloat16")."""

    __slots__ = ("data", "dtype", "palette", "shape")

    def __init__(
        self, dtype: str, shape: tuple[int, ...], data: memoryview, palette: Palette | None = None
    ) -> None:
        self.dtype = dtype
        self.shape = shape
        self.data = data
        self.palette = palette

    def numpy(self) -> np.ndarray:
        """The tensor, read-only unless it had to be expanded; bfloat16 comes as uint16 bit
        patterns."""
        if self.palette is not None:
            flat = expand(self.data, self.palette, math.prod(self.shape), self.dtype)
            return flat.reshape(self.shape)
        kind = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)


class Item:
    """A view on serialised item bytes."""

    __slots__ = ("fields", "header", "size_bytes")

    def __init__(self, header: ItemHeader, fields: dict[str, Field], size_bytes: int) -> None:
        self.header = header
        self.fields = fields
        self.size_bytes = size_bytes

    @property
    def modality(self) -> str:
        return MODALITIES[self.header.modality]

    @property
    def meta(self) -> ItemMeta:
        return meta_of(self.header)


def meta_of(header: ItemHeader) -> ItemMeta:
    embeds = sum(length for _, length in header.embed_runs)
    return ItemMeta(header.modality, len(header.replacement), embeds)


def pack_item(
    modality: int,
    replacement: tuple[int, ...],
    embed_runs: tuple[tuple[int, int], ...],
    fields: Mapping[str, tuple[str, np.ndarray]],
    codebooks: Mapping[str, Codebook] | None = None,
) -> bytes:
    """Serialises an item. `fields` maps a name to (torch dtype name, array); a bfloat16 tensor is
    given as a uint16 array of its bits. With `codebooks` (which may be empty) fields are stored
    short where that loses no bit; None stores all as they are."""
    infos, buffers, offset = [], [], 0
    for name in sorted(fields):
        dtype, array = fields[name]
        shape = tuple(array.shape)
        stored = _shorten(name, dtype, array, codebooks)
        if stored is None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            infos.append(FieldInfo(name, dtype, shape, offset, data.nbytes))
        else:
            data = stored.data
            infos.append(FieldInfo(name, dtype, shape, offset, data.nbytes, stored.palette))
        buffers.append(data)
        offset += -(-data.nbytes // ALIGN) * ALIGN
    header = msgspec.msgpack.encode(ItemHeader(modality, replacement, embed_runs, tuple(infos)))
    start = _section_start(len(header))
    out = bytearray(start + offset)
    out[0:4] = MAGIC
    out[4:8] = len(header).to_bytes(4, "little")
    out[8 : 8 + len(header)] = header
    for info, data in zip(infos, buffers, strict=True):
        begin = start + info.offset
        out[begin : begin + info.num_bytes] = data.data
    return bytes(out)


def _shorten(
    name: str, dtype: str, array: np.ndarray, codebooks: Mapping[str, Codebook] | None
) -> Stored | None:
    if codebooks is None:
        return None
    if dtype in INTEGERS:
        return encode_integers(array)
    book = codebooks.get(name) if dtype == "float32" else None
    return None if book is None else book.encode(array)


def _section_start(header_bytes: int) -> int:
    return -(-(8 + header_bytes) // ALIGN) * ALIGN


def read_header(buffer: bytes | memoryview) -> ItemHeader:
    """The header alone. Raises BadItem."""
    view = memoryview(buffer)
    if len(view) < 8 or view[:4] != MAGIC:
        raise BadItem("not a serialised item")
    length = int.from_bytes(view[4:8], "little")
    if 8 + length > len(view):
        raise BadItem("header runs past the end")
    try:
        header = _DECODER.decode(view[8 : 8 + length])
    except msgspec.MsgspecError as error:
        raise BadItem(f"header: {error}") from error
    _check(header)
    return header


def view_item(buffer: bytes | memoryview) -> Item:
    """The item as views on `buffer`. Raises BadItem when anything points outside it."""
    header = read_header(buffer)
    view = memoryview(buffer).cast("B").toreadonly()
    start = _section_start(int.from_bytes(view[4:8], "little"))
    fields = {}
    for info in header.fields:
        begin = start + info.offset
        if info.offset < 0 or begin + info.num_bytes > len(view):
            raise BadItem(f"field {info.name} runs past the end")
        data = view[begin : begin + info.num_bytes]
        fields[info.name] = Field(info.dtype, info.shape, data, info.palette)
    return Item(header, fields, len(view))


def _check(header: ItemHeader) -> None:
    if not 0 <= header.modality < len(MODALITIES):
        raise BadItem(f"unknown modality {header.modality}")
    end = 0
    for start, length in header.embed_runs:
        if start < end or length <= 0:
            raise BadItem("embed runs are not ascending")
        end = start + length
    if end > len(header.replacement):
        raise BadItem("embed runs reach past the replacement")
    for info in header.fields:
        size = ITEM_SIZES.get(info.dtype)
        if size is None:
            raise BadItem(f"field {info.name}: unknown dtype {info.dtype}")
        count = math.prod(info.shape)
        if info.palette is None:
            num_bytes = count * size
        elif info.palette.is_sound(count) and (
            info.dtype in INTEGERS if info.palette == BYTES else info.dtype == "float32"
        ):
            num_bytes = info.palette.num_bytes(count)
        else:
            raise BadItem(f"field {info.name}: no such palette")
        if any(dim < 0 for dim in info.shape) or num_bytes != info.num_bytes:
            raise BadItem(f"field {info.name}: shape and bytes differ")


_DECODER = msgspec.msgpack.Decoder(ItemHeader)
