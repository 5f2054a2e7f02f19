"""Audio as people record it: in several channels and containers, without a length."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import av
import numpy as np
import pytest

from foveal_runtime.frontend.media.timed import decode_audio
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaInvalid, MediaTooLarge
from foveal_runtime.wire.item import view_item
from tests.support.media_files import Pipe, wav

RATE = 16000
LIMITS = ModalityLimits(max_seconds=2.5)


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


def test_w64_of_a_pipe_is_read_to_its_end() -> None:
    """Its data is said to be as long as a number can say, which nothing would read."""
    assert len(decode_audio(recorded("w64", "pcm_s16le", "mono", 0.5), LIMITS, RATE)) == RATE
    with pytest.raises(MediaTooLarge, match="lasts 3"):
        decode_audio(recorded("w64", "pcm_s16le", "mono", 0.5, seconds=3.5), LIMITS, RATE)


@pytest.mark.parametrize("riff", [0, 36, 2**32 - 1])
def test_wav_whose_header_counts_nothing_is_read_to_its_end(riff: int) -> None:
    """What is written before its samples, and never again, was audio without samples."""

    def opened(file: bytes) -> bytes:
        return file[:4] + riff.to_bytes(4, "little") + file[8:40] + bytes(4) + file[44:]

    whole = wav(1.0, RATE)
    assert np.array_equal(
        decode_audio(opened(whole), LIMITS, RATE), decode_audio(whole, LIMITS, RATE)
    )
    with pytest.raises(MediaTooLarge, match="lasts"):
        decode_audio(opened(wav(3.5, RATE)), LIMITS, RATE)


def test_wav_without_samples_is_empty_whatever_follows() -> None:
    after = b"LIST" + (400).to_bytes(4, "little") + b"INFO" + bytes(396)
    whole = wav(0, RATE)
    for file in (whole, whole[:4] + (len(whole + after) - 8).to_bytes(4, "little")
                 + whole[8:] + after):  # fmt: skip
        with pytest.raises(MediaInvalid, match="no samples"):
            decode_audio(file, LIMITS, RATE)


@pytest.mark.parametrize("name", ["qwen2_audio", "gemma3n", "gemma4"])
def test_audio_that_a_processor_would_cut_off_is_refused(
    loaded: Callable[[str], Any], name: str
) -> None:
    """A model heard the first 30 seconds and answered, as if there were no more."""
    processor = loaded(name)[0]
    with pytest.raises(MediaTooLarge, match="hears no more than 30 s"):
        processor.decode(2, wav(31, RATE), {})
    heard = processor.decode(2, wav(30.2, RATE), {})
    assert view_item(processor.process(2, heard, {})).header.embed_runs


@pytest.mark.parametrize("name", ["audioflamingo3", "voxtral", "gemma4_unified"])
def test_audio_that_a_processor_takes_whole_is_not(loaded: Callable[[str], Any], name: str) -> None:
    processor = loaded(name)[0]
    counts = []
    for seconds in (30, 61):
        heard = processor.decode(2, wav(seconds, RATE), {})
        counts.append(len(view_item(processor.process(2, heard, {})).header.replacement))
    assert counts[1] > counts[0]


def test_audio_of_which_nothing_is_left_is_refused(loaded: Callable[[str], Any]) -> None:
    """Gemma 3n's processor made no features of ten milliseconds, and 188 tokens for them."""
    processor = loaded("gemma3n")[0]
    with pytest.raises(MediaInvalid, match="too short"):
        processor.process(2, processor.decode(2, wav(0.01, RATE), {}), {})
