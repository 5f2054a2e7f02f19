"""Videos whose headers lie about length, rate and size: refused or bounded, in little memory."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest

from foveal_runtime.frontend.media import timed
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaInvalid, MediaTooLarge
from foveal_runtime.telemetry.memory import peak_bytes, reset_peak
from tests.support.processes.mutations import sample

LIMITS = ModalityLimits(max_seconds=600, max_frames=64)
NUM_FRAMES = 8
MOST_BYTES = 256 << 20


def put(data: bytes, box: bytes, offset: int, *values: int) -> bytes:
    """Big-endian 32-bit numbers at an offset after the name of every such box of an MP4."""
    out, at = bytearray(data), data.find(box)
    assert at > 0, box
    while at > 0:
        struct.pack_into(f">{len(values)}I", out, at + 4 + offset, *values)
        at = data.find(box, at + 4)
    return bytes(out)


def webm(element: bytes, value: bytes) -> bytes:
    """A WebM whose element has another value of the same size."""
    data = bytearray(sample("webm"))
    at = data.find(element)
    assert at > 0, element
    size = data[at + len(element)] & 0x7F
    data[at + len(element) + 1 : at + len(element) + 1 + size] = value.rjust(size, b"\0")[-size:]
    return bytes(data)


MUCH = 0x7FFFFFFF
LIES: dict[str, Callable[[], bytes]] = {
    "movie lasts for ever": lambda: put(sample("mp4"), b"mvhd", 12, 1, MUCH),
    "movie has no time scale": lambda: put(sample("mp4"), b"mvhd", 12, 0, MUCH),
    "track lasts for ever": lambda: put(sample("mp4"), b"mdhd", 12, 1, MUCH),
    "track has no time scale": lambda: put(sample("mp4"), b"mdhd", 12, 0, 0),
    "a thousand million ticks a second": lambda: put(sample("mp4"), b"mdhd", 12, MUCH, 8),
    "two thousand million frames": lambda: put(sample("mp4"), b"stts", 8, MUCH, 1),
    "frames of no length": lambda: put(sample("mp4"), b"stts", 8, NUM_FRAMES, 0),
    "frames of negative length": lambda: put(sample("mp4"), b"stts", 8, NUM_FRAMES, 0xFFFFFF00),
    "as many sizes as numbers": lambda: put(sample("mp4"), b"stsz", 4, 0, MUCH),
    "frames of two gigabytes": lambda: put(sample("mp4"), b"stsz", 4, MUCH, NUM_FRAMES),
    "as many chunks as numbers": lambda: put(sample("mp4"), b"stco", 4, MUCH),
    "webm: not a number": lambda: webm(b"\x44\x89", struct.pack(">d", float("nan"))),
    "webm: infinite": lambda: webm(b"\x44\x89", struct.pack(">d", float("inf"))),
    "webm: negative": lambda: webm(b"\x44\x89", struct.pack(">d", -1.0)),
    "webm: 1e300": lambda: webm(b"\x44\x89", struct.pack(">d", 1e300)),
    "webm: no time scale": lambda: webm(b"\x2a\xd7\xb1", b"\0"),
    "webm: 65,535 wide": lambda: webm(b"\xb0", b"\xff\xff"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_refused_or_bounded(lie: str) -> None:
    """Neither hangs nor takes memory; frames that exist are all that come out."""
    asked: list[int] = []

    def choose(total: int, fps: float, width: int, height: int) -> list[int]:
        assert fps > 0
        asked.append(total)
        return list(range(min(total, LIMITS.max_frames)))

    data = LIES[lie]()
    assert reset_peak(os.getpid())
    before = peak_bytes(os.getpid())
    with contextlib.suppress(MediaInvalid, MediaTooLarge):
        frames = timed.decode_video(data, LIMITS, choose)
        assert set(frames.indices) <= set(range(NUM_FRAMES + 1))
        assert frames.pixels.shape[1:] == (48, 64, 3)
        assert frames.fps > 0
    most = LIMITS.max_seconds * timed.MAX_FRAMES_PER_SECOND
    assert all(1 <= total <= most for total in asked), asked
    assert peak_bytes(os.getpid()) < before + MOST_BYTES


@pytest.mark.parametrize("fps", [1e6, 1e9])
def test_a_rate_does_not_make_frames_of_a_short_time(fps: float) -> None:
    """With a million frames a second, ten minutes were 600 million frames for the processor to
    choose from."""

    class Stream:
        thread_type = ""

        class codec_context:
            width, height, options = 64, 48, None

    class Container:
        class streams:
            video = (Stream(),)

    def choose(*_: Any) -> list[int]:
        raise AssertionError("asked to choose")

    with pytest.raises(MediaTooLarge, match="lasts"):
        timed._read_frames(Container(), LIMITS, choose, int(fps) * 500, fps)


def test_a_frame_larger_than_the_container_says_is_not_decoded() -> None:
    """The container said 64x48; the decoder makes room for what the bitstream says."""
    few = ModalityLimits(max_pixels=64 * 47)
    lie = webm(b"\xb0", b"\x00\x20")  # 32 wide, it says
    with pytest.raises((MediaInvalid, MediaTooLarge)):
        timed.decode_video(lie, few, lambda total, *_: [0])
