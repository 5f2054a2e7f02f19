"""Tensors that have few values, stored as one byte an element: equal bit by bit.

Images are made of bytes. A processor that resizes bytes and then scales and shifts each channel
makes float32 tensors of at most 256 values a channel; the bytes and the table of those values are a
quarter of the tensor. Masks are int64 of zeros and ones, and need no table. `Codebook.encode`
(media workers, through `item.pack_item`) gives up unless every element comes back exactly, so
whether a processor is of that kind is never assumed. `expand` (engines, through `item.Field.numpy`)
needs no knowledge of processors. Pure numpy.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

LEVELS = 256
MAX_GROUPS = 4
Layout = Literal["one", "axis", "row", "last"]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Indices = np.ndarray[Any, np.dtype[np.uint8]]

_CHUNK = 1 << 16  # elements: temporaries stay in the processor's cache


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
        for rows, columns in _blocks(source.shape):
            for group in range(groups):
                part = source[rows, group, columns]
                found = self._find(group, part)
                if found is None:
                    return None
                indices[rows, group, columns] = found
        return Stored(palette, out)

    def _find(self, group: int, part: Floats) -> Indices | None:
        with np.errstate(all="ignore"):  # what is no number fails the comparison
            near = np.rint((part - self._first[group]) * self._scale[group])
            found = np.clip(near, 0, LEVELS - 1).astype(np.uint8)
        back = self.tables[group].take(found)
        return found if np.array_equal(back.view(np.uint32), _bits(part)) else None


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


def _bits(part: Floats) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.ascontiguousarray(part).view(np.uint32)
