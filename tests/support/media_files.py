"""Small media files, and what tests write such to."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


class Pipe:
    """A place that can be written to, and not gone back in: nothing at the start is put right."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, piece: bytes) -> int:
        self.data += piece
        return len(piece)


def png(seed: int, width: int, height: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    return buffer.getvalue()


def wav(seconds: float) -> bytes:
    import soundfile

    tone = np.sin(np.arange(int(seconds * 8000)) / 9).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, tone, 8000, format="WAV")
    return buffer.getvalue()


def mp4(num_frames: int) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((32, 48, 3), index * 9, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()
