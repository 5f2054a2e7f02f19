"""Serialised items survive the round trip and nothing outside the buffer is ever read."""

import msgspec
import numpy as np
import pytest

from foveal_runtime.wire.item import BadItem, pack_item, read_header, view_item


def _packed() -> bytes:
    pixels = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
    grid = np.array([[1, 2, 3]], dtype=np.int64)
    half = np.arange(5, dtype=np.uint16)
    return pack_item(
        0,
        (7, 9, 9, 9, 8),
        ((1, 3),),
        {
            "pixel_values": ("float32", pixels),
            "image_grid_thw": ("int64", grid),
            "extra": ("bfloat16", half),
        },
    )


def test_round_trip_keeps_every_field():
    item = view_item(_packed())
    assert item.modality == "image"
    assert item.header.replacement == (7, 9, 9, 9, 8)
    assert (item.meta.num_tokens, item.meta.num_embeds) == (5, 3)
    np.testing.assert_array_equal(item.fields["image_grid_thw"].numpy(), [[1, 2, 3]])
    assert item.fields["pixel_values"].numpy().shape == (2, 3, 4)
    assert item.fields["pixel_values"].numpy()[1, 2, 3] == 23.0
    assert item.fields["extra"].numpy().dtype == np.uint16


def test_size_is_the_length_of_the_bytes():
    packed = _packed()
    assert view_item(packed).size_bytes == len(packed)


@pytest.mark.parametrize("cut", [0, 3, 7, 20, 60, -70])
def test_truncated_bytes_are_refused(cut):
    with pytest.raises(BadItem):
        view_item(_packed()[:cut])


def test_overlapping_embed_runs_are_refused():
    with pytest.raises(BadItem, match="ascending"):
        read_header(pack_item(0, (1, 2, 3), ((0, 2), (1, 1)), {}))


def test_shape_that_disagrees_with_bytes_is_refused():
    packed = bytearray(_packed())
    index = packed.find(bytes([0x93, 0x02, 0x03, 0x04]))
    assert index > 0
    packed[index + 1] = 9
    with pytest.raises(BadItem, match="shape and bytes"):
        view_item(bytes(packed))


def _with_header(header: bytes) -> bytes:
    return b"FMI1" + len(header).to_bytes(4, "little") + header


@pytest.mark.parametrize(
    "header",
    [
        msgspec.msgpack.encode([0, [7], [[0, 1]], [["name", "int8", [0], 0, 0]]]).replace(
            b"name", b"na\xff\xfe"
        ),
        msgspec.msgpack.encode([0, [7], [[0, 1]]]).replace(b"\x93", b"\x95", 1)
        + b"\x90"
        + b"\x91" * 100_000
        + b"\x90",
    ],
    ids=["a name that is no text", "nested too deeply"],
)
def test_headers_that_cannot_be_decoded_are_no_items(header):
    """A UnicodeDecodeError or RecursionError from a peer's header ended the engine, not the
    session."""
    with pytest.raises(BadItem, match="header"):
        read_header(_with_header(header))


@pytest.mark.parametrize("token", [-1, 2**32])
def test_replacements_are_token_ids(token):
    """A negative one passed as smaller than the vocabulary, and hashing its block raised."""
    with pytest.raises(BadItem, match="header: Expected `int`"):
        read_header(pack_item(0, (1, token, 3), ((0, 1),), {}))
