"""Videos as cameras, browsers and pipes write them: without a length, turned on their side."""

from __future__ import annotations

import base64
import io
import struct

import av
import numpy as np
import pytest

from foveal_runtime.frontend.media.hashing import decode_data_url
from foveal_runtime.frontend.media.timed import decode_video
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaTooLarge
from tests.support.media_files import Pipe

NUM_FRAMES = 16
LIMITS = ModalityLimits(max_pixels=100_000, max_seconds=2.5, max_frames=NUM_FRAMES)


def recorded(kind: str, codec: str, num_frames: int = NUM_FRAMES, every: int = 1) -> bytes:
    """Frames ever brighter, eight a second, or one in `every` eighths of one."""
    pipe = Pipe()
    with av.open(pipe, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((48, 64, 3), index * 15 % 256, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = index * every
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return bytes(pipe.data)


def whole(total: int, fps: float, width: int, height: int) -> list[int]:
    return list(range(total))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("webm", "libvpx"),
        ("matroska", "libx264"),
        ("h264", "libx264"),
    ],
)
def test_a_file_that_says_no_length_is_read_to_its_end(kind: str, codec: str) -> None:
    """The first frame stood for all of it: what a browser records has neither a number of frames
    nor a duration."""
    data = recorded(kind, codec)
    with av.open(io.BytesIO(data)) as container:
        assert not container.streams.video[0].frames
        assert not container.duration
    frames = decode_video(data, LIMITS, whole)
    assert (frames.total, frames.indices) == (NUM_FRAMES, list(range(NUM_FRAMES)))
    assert np.allclose(frames.pixels.mean(axis=(1, 2, 3)), np.arange(NUM_FRAMES) * 15, atol=8)


@pytest.mark.parametrize(
    ("kind", "codec"), [("avi", "mpeg4"), ("ivf", "libvpx"), ("flv", "flv"), ("mpegts", "libx264")]
)
def test_a_length_that_is_not_that_of_the_file_does_not_count(kind: str, codec: str) -> None:
    """AVI and IVF of a pipe were a 413, of 107374182.4 s; FLV's last frame was left out."""
    frames = decode_video(recorded(kind, codec), LIMITS, whole)
    assert (frames.total, frames.indices) == (NUM_FRAMES, list(range(NUM_FRAMES)))
    assert np.allclose(frames.pixels.mean(axis=(1, 2, 3)), np.arange(NUM_FRAMES) * 15, atol=8)


def test_frames_that_do_not_follow_evenly_are_all_seen() -> None:
    """Of a screen's recording the first rate times how long it lasts gave far too many frames: what
    was chosen of them was the first frame again and again."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for index, time in enumerate((0, 1, 2, 8, 12, 16)):
            pixels = np.full((48, 64, 3), index * 40, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = time
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    frames = decode_video(buffer.getvalue(), LIMITS, whole)
    assert (frames.total, frames.indices) == (6, list(range(6)))
    assert frames.fps == pytest.approx(2.5)
    levels = frames.pixels[:, 20, 20, 0].astype(int)
    assert (np.abs(levels - np.arange(6) * 40) < 8).all()


def test_the_last_frame_stands_in_for_those_that_are_missing() -> None:
    """The last one of those that were chosen did, however early it was."""
    frames = decode_video(recorded("h264", "libx264", 6), LIMITS, lambda *_: [0, 9, 12])
    assert frames.indices == [0, 5, 5]
    assert abs(int(frames.pixels[2, 20, 20, 0]) - 5 * 15) < 8


def test_its_rate_is_that_of_its_frames() -> None:
    """The container knows of no rate but that of its clock, where frames come irregularly."""
    assert decode_video(recorded("webm", "libvpx"), LIMITS, whole).fps == pytest.approx(8, rel=0.02)
    slow = recorded("webm", "libvpx", 4, every=5)
    assert decode_video(slow, LIMITS, whole).fps == pytest.approx(8 / 5, rel=0.02)


def test_its_length_is_limited() -> None:
    with pytest.raises(MediaTooLarge, match=r"video lasts .* the limit is 2.5 s"):
        decode_video(recorded("webm", "libvpx", 24), LIMITS, whole)


def test_a_data_url_may_name_several_codecs() -> None:
    """As a browser's recorder does: the comma between them was taken for the payload's."""
    data = recorded("webm", "libvpx")
    text = base64.b64encode(data).decode()
    url = f"data:video/webm;codecs=vp8,opus;base64,{text}"
    assert decode_data_url(url, max_bytes=len(data)) == data


ONE = 0x10000
TURNS = [(a, 0, 0, d) for a in (1, -1) for d in (1, -1)]
TURNS += [(0, b, c, 0) for b in (1, -1) for c in (1, -1)]


@pytest.mark.parametrize("matrix", TURNS)
def test_a_video_is_seen_as_a_player_shows_it(matrix: tuple[int, int, int, int]) -> None:
    """A phone that is held upright records frames that lie on their side, and a matrix by which
    they are to be turned: (x, y) is shown at (ax + cy, bx + dy)."""
    greys = np.array([[240, 160], [80, 0]], np.uint8)
    pixels = np.repeat(np.kron(greys, np.ones((24, 32), np.uint8))[:, :, None], 3, axis=2)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    data, (a, b, c, d) = bytearray(file.getvalue()), matrix
    at = data.find(b"tkhd") + 4 + 40
    struct.pack_into(">5i", data, at, a * ONE, b * ONE, 0, c * ONE, d * ONE)
    asked: list[tuple[int, int]] = []

    def choose(total: int, fps: float, width: int, height: int) -> list[int]:
        asked.append((width, height))
        return [0]

    expected = np.zeros((2, 2))
    for row, y in enumerate((-1, 1)):
        for column, x in enumerate((-1, 1)):
            expected[(b * x + d * y + 1) // 2, (a * x + c * y + 1) // 2] = greys[row, column]
    [found] = decode_video(bytes(data), LIMITS, choose).pixels
    height, width, _ = found.shape
    assert (width, height) == ((64, 48) if a else (48, 64))
    assert asked == [(width, height)]
    means = found.reshape(2, height // 2, 2, width // 2, 3).mean(axis=(1, 3, 4))
    assert np.allclose(means, expected, atol=8)
