"""The bytes of one processed media item: what caches store, hash sizes count and engines read.

Made by frontend media workers (`pack_item`), read by engine/ (metadata, splicing) and model/
(tensors as views, no copy). The size of an item is the length of these bytes, on both sides, by
definition. Bytes come from peers: every offset is checked before it is used.

Tensors of few values are stored as one byte an element and a table, equal bit by bit: images are
made of bytes, so a processor that resizes them and then scales and shifts each channel makes
float32 tensors of at most 256 values a channel. Whether a processor is of that kind is never
assumed: `Codebook.encode` gives up unless every element comes back exactly; `expand` needs no
knowledge of processors. Masks are int64 of zeros and ones, and need no table.

Layout: magic (4) | header length u32 | msgpack ItemHeader | padding | buffers, each 64-aligned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from foveal_runtime.plan.media import MODALITIES, ItemMeta

LEVELS = 256
MAX_GROUPS = 4
Layout = Literal["one", "axis", "row", "last"]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Indices = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = 1 << 14  # elements: temporaries stay in the processor's cache


class Palette(msgspec.Struct, frozen=True, array_like=True):
    """How elements find their table: element i takes table (i // inner) % groups.

    The stored bytes are `groups` tables of 256 float32, then one byte an element. Without groups
    the bytes themselves are the values, of an integer tensor.
    """

    groups: int
    inner: int

    def num_bytes(self, num_elements: int) -> int:
        return self.groups * LEVELS * 4 + num_elements

    def is_sound(self, num_elements: int) -> bool:
        """False: not from us."""
        return self == BYTES or (
            1 <= self.groups <= MAX_GROUPS
            and self.inner >= 1
            and num_elements % (self.groups * self.inner) == 0
        )


BYTES = Palette(0, 1)
INTEGERS = ("int16", "int32", "int64")


class Stored(NamedTuple):
    """A field in its short form: `data` is tables and indices."""

    palette: Palette
    data: Indices


class Codebook:
    """What is known of one field of one processor: a sorted table for each channel, and which
    elements belong to which channel.

    Args:
        layout: "one" = all elements use the one table; "axis" = dimension -3 is the channel;
            "row" = the last dimension is channels times equal parts; "last" = it is the channel.
        tables: (channels, 256) float32, ascending.
    """

    def __init__(self, layout: Layout, tables: Floats) -> None:
        assert tables.shape[1:] == (LEVELS,)
        assert 1 <= len(tables) <= MAX_GROUPS
        self.layout = layout
        self.tables = tables
        # Nearly evenly spaced, so a multiplication finds the index and equality proves it.
        self._first = tables[:, :1]
        self._scale = (LEVELS - 1) / (tables[:, -1:] - self._first)

    def encode(self, array: Floats) -> Stored | None:
        """The short form; None when any element would not come back bit by bit."""
        groups = len(self.tables)
        inner = inner_of(self.layout, array.shape, groups)
        if array.dtype != np.float32 or not inner or Palette(groups, inner).num_bytes(
            array.size
        ) >= array.nbytes:  # fmt: skip
            return None
        palette = Palette(groups, inner)
        out = np.empty(palette.num_bytes(array.size), np.uint8)
        head = groups * LEVELS * 4
        out[:head] = self.tables.reshape(-1).view(np.uint8)
        source = np.ascontiguousarray(array).reshape(-1, groups, inner)
        indices = out[head:].reshape(source.shape)
        scratch = _Scratch()
        for rows, columns in _blocks(source.shape):
            for group in range(groups):
                part = source[rows, group, columns]
                if not self._find(group, part, indices[rows, group, columns], scratch):
                    return None
        return Stored(palette, out)

    def _find(self, group: int, part: Floats, found: Indices, scratch: _Scratch) -> bool:
        """Fills `found`; False when any element would not come back bit by bit."""
        near = scratch.near[: part.size].reshape(part.shape)
        back = scratch.back[: part.size].reshape(part.shape)
        with np.errstate(all="ignore"):  # what is no number fails the comparison
            np.subtract(part, self._first[group], out=near)
            np.multiply(near, self._scale[group], out=near)
            np.add(near, np.float32(0.5), out=near)
            np.copyto(found, near, casting="unsafe")  # a wrong index fails the comparison, too
        np.take(self.tables[group], found, out=back, mode="clip")
        return np.array_equal(back.view(np.uint32), part.view(np.uint32))


class _Scratch:
    """For the temporaries of one encoding: memory that the kernel maps for each costs more than the
    arithmetic."""

    def __init__(self) -> None:
        self.near = np.empty(_CHUNK, np.float32)
        self.back = np.empty(_CHUNK, np.float32)


def encode_integers(array: np.ndarray[Any, Any]) -> Stored | None:
    """The short form of an integer tensor of a table's size or more; None when it has values
    outside 0 to 255."""
    if array.size < LEVELS or array.min() < 0 or array.max() >= LEVELS:
        return None
    return Stored(BYTES, np.ascontiguousarray(array).reshape(-1).astype(np.uint8))


def expand(
    data: memoryview, palette: Palette, num_elements: int, dtype: str = "float32"
) -> np.ndarray[Any, Any]:
    """The elements, flat. `data` has `palette.num_bytes(num_elements)` bytes."""
    if palette == BYTES:
        return np.frombuffer(data, np.uint8).astype(dtype)
    head = palette.groups * LEVELS * 4
    tables = np.frombuffer(data[:head], np.float32).reshape(palette.groups, LEVELS)
    indices = np.frombuffer(data[head:], np.uint8).reshape(-1, palette.groups, palette.inner)
    out = np.empty(indices.shape, np.float32)
    for rows, columns in _blocks(indices.shape):
        for group in range(palette.groups):
            out[rows, group, columns] = tables[group].take(indices[rows, group, columns])
    return out.reshape(num_elements)


def inner_of(layout: Layout, shape: tuple[int, ...], groups: int) -> int:
    """`Palette.inner` for a tensor of that shape; 0 when the layout does not fit it."""
    if not shape or math.prod(shape) == 0:
        return 0
    if layout == "one":
        return math.prod(shape)
    if layout == "axis":
        return math.prod(shape[-2:]) if len(shape) > 2 and shape[-3] == groups else 0
    if layout == "row":
        return shape[-1] // groups if shape[-1] % groups == 0 else 0
    return 1 if shape[-1] == groups else 0


def _blocks(shape: tuple[int, ...]) -> list[tuple[slice, slice]]:
    """(rows, columns) of an array (n, groups, inner), about _CHUNK elements each."""
    num_rows, _, inner = shape
    columns = min(inner, _CHUNK)
    rows = max(1, _CHUNK // columns)
    return [
        (slice(r, r + rows), slice(c, c + columns))
        for r in range(0, num_rows, rows)
        for c in range(0, inner, columns)
    ]


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


U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class ItemHeader(msgspec.Struct, frozen=True, array_like=True):
    """All of an item but its tensors.

    Attributes:
        modality: index into plan.media.MODALITIES.
        replacement: token ids that the item's one placeholder token expands to.
        embed_runs: (start, length) runs inside `replacement` that take encoder outputs.
        fields: the processor's tensors for this item alone, as its model names them.
    """

    modality: int
    replacement: tuple[U32, ...]
    embed_runs: tuple[tuple[int, int], ...]
    fields: tuple[FieldInfo, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A tensor of an item as stored bytes: `data` is a view, `dtype` a torch name ("bfloat16")."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    palette: Palette | None = None

    def numpy(self) -> np.ndarray:
        """The tensor, read-only unless it had to be expanded; bfloat16 comes as uint16 bit
        patterns."""
        if self.palette is not None:
            flat = expand(self.data, self.palette, math.prod(self.shape), self.dtype)
            return flat.reshape(self.shape)
        kind = "uint16" if self.dtype == "bfloat16" else self.dtype
        return np.frombuffer(self.data, dtype=kind).reshape(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """A view on serialised item bytes."""

    header: ItemHeader
    fields: dict[str, Field]
    size_bytes: int

    @property
    def modality(self) -> str:
        return MODALITIES[self.header.modality]

    @property
    def meta(self) -> ItemMeta:
        return meta_of(self.header)


def meta_of(header: ItemHeader) -> ItemMeta:
    embeds = sum(length for _, length in header.embed_runs)
    return ItemMeta(header.modality, len(header.replacement), embeds)


def runs_of(ids: Sequence[int], token_id: int) -> tuple[tuple[int, int], ...]:
    """(start, length) runs of `token_id` in `ids`."""
    mask = np.concatenate(([0], np.asarray(ids) == token_id, [0])).astype(np.int8)
    edges = np.flatnonzero(np.diff(mask)).tolist()
    return tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True))


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
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
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
