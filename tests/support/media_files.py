"""Small media files, and what tests write such to."""

from __future__ import annotations

import io
import wave

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


def wav(seconds: float, rate: int = 8000) -> bytes:
    import soundfile

    samples = np.sin(np.arange(int(seconds * rate)) / 9).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV")
    return buffer.getvalue()


def tone(hertz: float, seconds: float = 0.5, rate: int = 16000) -> bytes:
    """As a WAV file of 16 bits."""
    times = np.arange(int(seconds * rate)) / rate
    samples = (np.sin(times * hertz * 2 * np.pi) * 20_000).astype("<i2")
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(samples.tobytes())
    return buffer.getvalue()


def mp4(
    num_frames: int, rate: int = 4, size: tuple[int, int] = (48, 32), first: int = 0, step: int = 9
) -> bytes:
    """Frames of one shade each: that of the first, and how much brighter the next ones are."""
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for index in range(num_frames):
            pixels = np.full((size[1], size[0], 3), (first + index * step) % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()
