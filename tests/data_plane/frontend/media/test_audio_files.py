"""Audio as people record it: in several channels and containers, without a length."""

from __future__ import annotations

import io

import av
import numpy as np
import pytest

from foveal_runtime.frontend.media.timed import decode_audio
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaTooLarge

RATE = 16000
LIMITS = ModalityLimits(max_seconds=2.5)


class Pipe:
    """A place that can be written to, and not gone back in: nothing at the start is put right."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, piece: bytes) -> int:
        self.data += piece
        return len(piece)


def recorded(kind: str, codec: str, layout: str, *shares: float, seconds: float = 1.0) -> bytes:
    """A tone, in each channel of `layout` with its share of full scale."""
    tone = np.sin(2 * np.pi * 440 * np.arange(int(seconds * 48000)) / 48000)
    samples = np.stack([tone * share for share in shares]).astype(np.float32)
    whole = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
    whole.sample_rate = 48000
    pipe = io.BytesIO() if kind in ("mp4", "mov") else Pipe()
    with av.open(pipe, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=48000, layout=layout)
        form = stream.codec_context.format.name
        for frame in av.AudioResampler(form, layout, 48000).resample(whole):
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return pipe.getvalue() if isinstance(pipe, io.BytesIO) else bytes(pipe.data)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("wav", "pcm_s16le"), ("matroska", "pcm_s16le"), ("mp4", "aac"), ("webm", "libopus")],
)
@pytest.mark.parametrize(
    ("layout", "shares"),
    [("mono", (0.5,)), ("stereo", (0.8, 0.2)), ("stereo", (0.5, 0.0)), ("5.1", (0.5,) * 6)],
)
def test_channels_become_their_mean(
    kind: str, codec: str, layout: str, shares: tuple[float, ...]
) -> None:
    """What libsndfile does not read was 1.4 times as loud in stereo, and 3.4 times in 5.1."""
    samples = decode_audio(recorded(kind, codec, layout, *shares), LIMITS, RATE)
    middle = samples[RATE // 4 : RATE // 2]
    loudness = np.sqrt(np.mean(middle**2)) * np.sqrt(2)
    assert loudness == pytest.approx(np.mean(shares), rel=0.2)  # of 5.1 AAC drops one


def test_flac_without_a_length_is_read_to_its_end() -> None:
    """Of one that a pipe was written to it was said to last 209146758205323.7 s."""
    samples = decode_audio(recorded("flac", "flac", "mono", 0.5), LIMITS, RATE)
    assert len(samples) == RATE
    with pytest.raises(MediaTooLarge, match="lasts 2"):
        decode_audio(recorded("flac", "flac", "mono", 0.5, seconds=3.5), LIMITS, RATE)
