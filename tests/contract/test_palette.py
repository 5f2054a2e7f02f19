"""Tensors of few values in short form: they come back bit by bit, or are stored as they are."""

import msgspec
import numpy as np
import pytest

from foveal_runtime.frontend.media.probe import learn, probe_images
from foveal_runtime.wire.item import (
    LEVELS,
    BadItem,
    Codebook,
    FieldInfo,
    Palette,
    pack_item,
    view_item,
)

MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
RNG = np.random.default_rng(11)


def tables() -> np.ndarray:
    levels = np.arange(LEVELS, dtype=np.float32) / np.float32(255)
    return (levels[None] - MEAN[:, None]) / STD[:, None]


def pixels(layout: str) -> np.ndarray:
    levels = RNG.integers(0, LEVELS, (5, 3, 40, 40))
    first = tables()[np.arange(3)[None, :, None, None], levels]
    if layout == "last":
        return np.ascontiguousarray(first.transpose(0, 2, 3, 1))
    return first.reshape(5, 4800) if layout == "row" else first


def pack(array: np.ndarray, books: dict | None, dtype: str = "float32") -> bytes:
    return pack_item(0, (1,), ((0, 1),), {"x": (dtype, array)}, books)


@pytest.mark.parametrize("layout", ["axis", "row", "last"])
def test_every_bit_comes_back(layout):
    array = pixels(layout)
    short = pack(array, {"x": Codebook(layout, tables())})
    assert len(short) < 0.4 * len(pack(array, None))
    back = view_item(short).fields["x"].numpy()
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


@pytest.mark.parametrize("odd", [np.float32(0.123), np.nan, np.inf, -np.inf, "ulp", "-0"])
def test_one_value_that_is_not_in_the_table_keeps_all_as_they_are(odd):
    array, table = pixels("axis"), tables()
    if odd == "-0":
        table[1, 0] = 0.0
        odd = np.float32(-0.0)
    spot = (4, 1, 39, 39)
    array[spot] = np.nextafter(array[spot], np.float32(9)) if isinstance(odd, str) else odd
    value = pack(array, {"x": Codebook("axis", table)})
    assert len(value) == len(pack(array, None))
    assert view_item(value).fields["x"].numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (3,), (2, 4, 8, 8), (3, 8, 8)])
def test_shapes_a_codebook_was_not_made_for(shape):
    array = np.full(shape, tables()[0, 7], np.float32)
    value = pack(array, {"x": Codebook("axis", tables())})
    assert view_item(value).fields["x"].numpy().tobytes() == array.tobytes()


@pytest.mark.parametrize("dtype", ["int16", "int32", "int64"])
@pytest.mark.parametrize(("top", "is_short"), [(1, True), (255, True), (256, False)])
def test_masks_are_stored_as_bytes(dtype, top, is_short):
    mask = np.zeros((2, 30, 30), dtype)
    mask[1, 29, 29] = top
    value = pack(mask, {}, dtype)
    assert (len(value) < len(pack(mask, None, dtype))) == is_short
    back = view_item(value).fields["x"].numpy()
    assert back.dtype == mask.dtype
    np.testing.assert_array_equal(back, mask)
    grid = np.array([[1, 2, 3]], dtype)
    assert pack(grid, {}, dtype) == pack(grid, None, dtype), "small ones stay readable"


@pytest.mark.parametrize(
    "palette", [Palette(0, 1), Palette(5, 1), Palette(3, 0), Palette(3, 7), Palette(-1, 1)]
)
def test_palettes_that_cannot_be_are_refused(palette):
    array = pixels("axis")
    good = pack(array, {"x": Codebook("axis", tables())})
    size = int.from_bytes(good[4:8], "little")
    header = msgspec.msgpack.decode(good[8 : 8 + size])
    info = msgspec.convert(header[3][0], FieldInfo)
    header[3] = [msgspec.structs.replace(info, palette=palette)]
    bad = msgspec.msgpack.encode(header)
    with pytest.raises(BadItem, match=r"palette|differ"):
        view_item(good[:4] + len(bad).to_bytes(4, "little") + bad + good[8 + size :])


def test_learning_takes_only_what_bytes_made():
    def process(picture):
        raw = np.asarray(picture).transpose(2, 0, 1)
        exact = tables()[np.arange(3)[:, None, None], raw]
        return {
            "pixels": ("float32", exact[None]),
            "blurred": ("float32", (exact[None] + np.roll(exact[None], 1, -1)) / 2),
            "small": ("float32", np.zeros(3, np.float32)),
            "grid": ("int64", np.zeros((1, 3), np.int64)),
        }

    books = learn(process)
    assert list(books) == ["pixels"]
    assert books["pixels"].layout == "axis"
    np.testing.assert_array_equal(books["pixels"].tables, tables())


@pytest.mark.parametrize("blocks", [4, 8])
def test_probe_images_hold_every_value_in_every_channel(blocks):
    seen = np.concatenate([np.asarray(p).reshape(-1, 3) for p in probe_images(blocks)])
    assert all(len(np.unique(seen[:, channel])) == LEVELS for channel in range(3))
