"""Videos as cameras, browsers and pipes write them: without a length, turned on their side."""

from __future__ import annotations

import base64
import io

import av
import numpy as np
import pytest

from foveal_runtime.frontend.media.hashing import decode_data_url
from foveal_runtime.frontend.media.timed import decode_video
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaTooLarge

NUM_FRAMES = 16
LIMITS = ModalityLimits(max_pixels=64 * 48, max_seconds=2.5, max_frames=NUM_FRAMES)


class Pipe:
    """A place that can be written to, and not gone back in: nothing at the start is put right."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, piece: bytes) -> int:
        self.data += piece
        return len(piece)


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
    ("kind", "codec"), [("webm", "libvpx"), ("matroska", "libx264"), ("h264", "libx264")]
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
