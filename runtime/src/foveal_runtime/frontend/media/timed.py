"""Encoded audio and video → samples and frames, within limits checked before decoding.

Runs in media workers only. Like `decode`, it answers with the right samples or with MediaInvalid /
MediaTooLarge. Frames are chosen first (the processor's own sampling rule) and only those are kept.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from foveal_runtime.frontend.media.decode import (
    check_bytes,
    check_pixels,
    decode_image,
    describe,
    fitted,
)
from foveal_runtime.frontend.media.hashing import unpack_frames
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import FovealError, MediaInvalid, MediaTooLarge

READING = b"timed-4"
"""Changes with the samples or frames that the same file becomes: part of every key."""
_BLOCK_FRAMES = 1 << 14
_UNKNOWN_FRAMES = (1 << 63) - 1
"""What libsndfile says of a FLAC that was written without its length, as it was recorded."""
_DATA_OF_W64 = b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"
_OPEN_W64 = _DATA_OF_W64 + _UNKNOWN_FRAMES.to_bytes(8, "little")
"""What FFmpeg writes where it cannot go back to say how much there is; libsndfile refuses it."""
MAX_RATE = 384_000
MAX_SAMPLE = 2.0**32
"""Beyond what any scale of integers gives: its square, summed up, leaves 32-bit floats."""
SAMPLES_PER_SECOND = 8 * 48_000
"""Of all channels together, on average over the longest audio allowed."""
PADDING_SECONDS = 0.25
"""What a codec may add to the end of audio, which is lost where a processor cuts it off."""
MAX_FRAMES_PER_SECOND = 240
"""Of a video, by which the frames that are looked at are bounded, whatever its header says."""
GIVEN_FRAMES_PER_SECOND = 2.0
"""Of a video that comes as images, which says nothing of times."""
MAX_VIDEO_IMAGES = 16
"""Chosen frames together have at most so many times the pixels of the largest image."""


def decode_audio(
    data: bytes | memoryview, limits: ModalityLimits, sampling_rate: int, heard: int = 0
) -> np.ndarray[Any, Any]:
    """Mono float32 samples at `sampling_rate` Hz; more than `heard` of them are refused, unless
    that is 0."""
    import soundfile

    check_bytes(data, limits, "audio")
    if data[:4] == b"riff":
        data = bytes(data).replace(_OPEN_W64, _DATA_OF_W64 + bytes(8), 1)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            mono, rate = _read_mono(file, limits), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError):
        mono, rate = _av_audio(data, limits)
    if len(mono) == 0 and _has_open_end(data):
        mono, rate = _av_audio(data, limits)
    if len(mono) == 0:
        raise MediaInvalid("audio has no samples")
    if not np.abs(mono).max() <= MAX_SAMPLE:  # as it is not where one is no number
        raise MediaInvalid(
            "audio has samples that are not finite or far too large; send samples from -1 to 1"
        )
    if rate != sampling_rate:
        import soxr

        mono = soxr.resample(mono, rate, sampling_rate)
        if len(mono) == 0:
            raise MediaInvalid(f"audio is too short: it has no sample at {sampling_rate} Hz")
    if heard and len(mono) > heard + PADDING_SECONDS * sampling_rate:
        raise MediaTooLarge(
            f"audio lasts {len(mono) / sampling_rate:.1f} s, and this model hears no more than "
            f"{heard / sampling_rate:g} s of a part; send it in pieces"
        )
    return np.ascontiguousarray(mono, dtype=np.float32)


def _has_open_end(data: bytes | memoryview) -> bool:
    """Whether it is a WAV whose header counts less than there is, as a pipe leaves it; libsndfile
    takes a size of 0 at its word, and FFmpeg for all that follows."""
    size = int.from_bytes(data[4:8], "little")
    return data[:4] == b"RIFF" and not len(data) <= size + 8 < 1 << 32


def _read_mono(file: Any, limits: ModalityLimits) -> np.ndarray[Any, Any]:
    """The mean of all channels, read block by block: neither the header nor a format that packs
    silence well decides how much memory it takes."""
    rate, channels = max(1, file.samplerate), max(1, file.channels)
    if file.frames < _UNKNOWN_FRAMES:
        check_seconds(file.frames / rate, limits, "audio")
        _check_samples(file.frames * channels, limits)
    blocks: list[np.ndarray[Any, Any]] = []
    count = 0
    while len(block := file.read(_BLOCK_FRAMES, dtype="float32", always_2d=True)):
        count += len(block)
        check_seconds(count / rate, limits, "audio")
        _check_samples(count * channels, limits)
        blocks.append(block.mean(axis=1))
    return np.concatenate(blocks) if blocks else np.zeros(0, np.float32)


def _check_samples(num_samples: int, limits: ModalityLimits) -> None:
    most = int(limits.max_seconds * SAMPLES_PER_SECOND)
    if num_samples > most:
        raise MediaTooLarge(f"audio has {num_samples} samples in all channels, the limit is {most}")


def check_seconds(seconds: float, limits: ModalityLimits, what: str) -> None:
    if seconds > limits.max_seconds:
        raise MediaTooLarge(f"{what} lasts {seconds:.1f} s, the limit is {limits.max_seconds:g} s")


def _av_audio(data: bytes | memoryview, limits: ModalityLimits) -> tuple[np.ndarray[Any, Any], int]:
    """What libsndfile does not read (AAC in MP4, ...): samples and their rate."""
    import av

    try:
        with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
            if not container.streams.audio:
                raise MediaInvalid("audio cannot be read: the file has no audio stream")
            stream = container.streams.audio[0]
            rate = int(stream.rate or 0) or 16000
            if rate > MAX_RATE:
                raise MediaTooLarge(f"audio has {rate} samples a second, the limit is {MAX_RATE}")
            # Not mixed by it: to mono it adds channels up, louder than their mean.
            resampler = av.AudioResampler(format="fltp", rate=rate)
            parts: list[np.ndarray[Any, Any]] = []
            count = 0
            for decoded in container.decode(stream):
                for piece in resampler.resample(decoded):
                    channels = piece.to_ndarray()
                    parts.append(channels.mean(axis=0))
                    count += channels.shape[1]
                    _check_samples(count * channels.shape[0], limits)
                    check_seconds(count / rate, limits, "audio")
    except (MediaInvalid, MediaTooLarge):
        raise
    except Exception as error:  # PyAV raises a family of its own plus ValueError, IndexError, ...
        raise MediaInvalid(f"audio cannot be read ({describe(data)})") from error
    return np.concatenate(parts) if parts else np.zeros(0, np.float32), rate


@dataclass(slots=True, eq=False)
class Frames:
    """Chosen frames of a video: `pixels` (n, height, width, 3) uint8, and where they came from."""

    pixels: np.ndarray[Any, Any]
    indices: list[int]
    total: int
    fps: float

    def filled(self, least: int) -> Frames:
        """With the last one repeated up to `least` frames, as processors fill up what they take
        together; some refuse fewer."""
        missing = least - len(self.indices)
        if missing <= 0:
            return self
        pixels = np.concatenate([self.pixels, self.pixels[-1:].repeat(missing, axis=0)])
        return Frames(pixels, self.indices + self.indices[-1:] * missing, self.total, self.fps)


Choose = Callable[[int, float, int, int], list[int]]
"""(number of frames, frames per second, width, height) → ascending frame indices to keep."""


def decode_video(data: bytes | memoryview, limits: ModalityLimits, choose: Choose) -> Frames:
    """The frames that `choose` picks, RGB. Raises MediaInvalid or MediaTooLarge."""
    import av

    check_bytes(data, limits, "video")
    if frames := unpack_frames(data):
        return _given_frames(frames, limits)
    try:
        with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
            if not container.streams.video:
                raise MediaInvalid("video cannot be read: the file has no video stream")
            length = _length(container, limits) or _counted(data, limits)
            return _read_frames(container, limits, choose, *length)
    except FovealError:  # of what is asked for, too
        raise
    except MemoryError as error:
        raise MediaTooLarge("video needs more memory than a media worker has") from error
    except Exception as error:  # PyAV raises a family of its own plus ValueError, IndexError, ...
        raise MediaInvalid(f"video cannot be read ({describe(data)})") from error


def _given_frames(frames: list[memoryview], limits: ModalityLimits) -> Frames:
    """A video that came as images: its sender chose the frames, so each of them is kept."""
    if len(frames) > limits.max_frames:
        raise MediaTooLarge(f"video has {len(frames)} frames, the limit is {limits.max_frames}")
    images = [decode_image(frame, limits) for frame in frames]
    sizes = {image.size for image in images}
    if len(sizes) > 1:
        shown = " and ".join(f"{width}x{height}" for width, height in sorted(sizes)[:2])
        raise MediaInvalid(f"the video's frames differ in size: {shown}")
    pixels = np.stack([np.asarray(image) for image in images])
    return Frames(pixels, list(range(len(images))), len(images), GIVEN_FRAMES_PER_SECOND)


def _rate(stream: Any) -> float:
    return float(stream.average_rate or stream.guessed_rate or 24.0)


def _length(container: Any, limits: ModalityLimits) -> tuple[int, float] | None:
    """Frames of the video and frames per second; None where the container does not say how many
    there are, or more than may be: what is written while it is recorded holds no number, or the
    largest one. How long it lasts does not tell, because frames need not follow evenly."""
    fps = _rate(container.streams.video[0])
    total = int(container.streams.video[0].frames or 0)
    return (total, fps) if 0 < total <= limits.max_seconds * fps else None


def _counted(data: bytes | memoryview, limits: ModalityLimits) -> tuple[int, float]:
    """The same of the packets that the file holds, none of which is decoded. The file is opened
    once more, because not every format can be read a second time from its start."""
    import av

    with av.open(io.BytesIO(data), mode="r", metadata_errors="ignore") as container:
        stream = container.streams.video[0]
        total, times = 0, []
        for packet in container.demux(stream):
            total += packet.size > 0
            check_seconds(total / MAX_FRAMES_PER_SECOND, limits, "video")
            if packet.pts is not None:
                times.append(packet.pts * float(packet.time_base))
        lasts = max(times) - min(times) if times else 0.0
        # What a recording says of its rate is often its clock's, a thousand a second.
        return max(1, total), (len(times) - 1) / lasts if lasts > 0 else _rate(stream)


def _turn(frame: Any) -> tuple[bool, bool, bool]:
    """How a frame is to be shown, as its display matrix has it, to a quarter of a turn: whether
    rows become columns, and whether it is then mirrored from left to right, from top to bottom."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False, False, False
    a, b, _, c, d = (int(number) for number in np.frombuffer(matrix, np.int32)[:5])
    if abs(b) + abs(c) > abs(a) + abs(d):
        return True, c < 0, b < 0
    return False, a < 0, d < 0


def _upright(pixels: np.ndarray[Any, Any], turn: tuple[bool, bool, bool]) -> np.ndarray[Any, Any]:
    turns, mirrors, inverts = turn
    pixels = pixels.transpose(1, 0, 2) if turns else pixels
    pixels = pixels[:, ::-1] if mirrors else pixels
    return pixels[::-1] if inverts else pixels


def _shown(
    frame: Any, size: tuple[int, int], small: tuple[int, int], turn: tuple[bool, bool, bool]
) -> np.ndarray[Any, Any]:
    """A frame of `size` as RGB, resized to `small` and turned. Raises MediaInvalid for another."""
    if (frame.width, frame.height) != size:
        before = f"{size[0]}x{size[1]}"
        raise MediaInvalid(f"video changes from {before} to {frame.width}x{frame.height}")
    if small != size:
        frame = frame.reformat(width=small[0], height=small[1], format="rgb24")
    return _upright(frame.to_ndarray(format="rgb24"), turn)


def _read_frames(
    container: Any, limits: ModalityLimits, choose: Choose, total: int, fps: float
) -> Frames:
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    stream.codec_context.thread_count = 4
    # Checked by the decoder before it makes room for a frame, whatever the container says.
    stream.codec_context.options = {"max_pixels": str(limits.max_pixels)}
    width, height = int(stream.codec_context.width), int(stream.codec_context.height)
    check_pixels(width, height, limits)
    check_seconds(total / fps, limits, "video")
    check_seconds(total / MAX_FRAMES_PER_SECOND, limits, "video")
    decoded = container.decode(stream)
    first = next(decoded, None)
    if first is None:
        raise MediaInvalid(f"video has no readable frames (read 0 of {total})")
    turn = _turn(first)
    shown = (height, width) if turn[0] else (width, height)
    wanted = [i for i in choose(total, fps, *shown) if i >= 0]
    if len(wanted) > limits.max_frames:
        raise MediaTooLarge(
            f"video would give {len(wanted)} frames, the limit is {limits.max_frames}; "
            "ask for fewer with num_frames or fps"
        )
    small = fitted(width, height, limits.resize_pixels)
    most = limits.max_pixels * MAX_VIDEO_IMAGES
    if len(set(wanted)) * small[0] * small[1] > most:
        raise MediaTooLarge(
            f"video would give {len(set(wanted))} frames of {small[0]}x{small[1]}, the limit is "
            f"{most} pixels in all; ask for fewer with num_frames or fps"
        )
    keep, kept, index = set(wanted), {}, 0
    for index, frame in enumerate(itertools.chain([first], decoded)):
        check_seconds(index / MAX_FRAMES_PER_SECOND, limits, "video")
        check_seconds(index / fps, limits, "video")
        if index in keep:
            kept[index] = _shown(frame, (width, height), small, turn)
        if index >= max(keep, default=0):
            break
    if not keep:
        raise MediaInvalid(f"video has no readable frames (read {index + 1} of {total})")
    if index not in kept:  # The container promises more frames than it holds: the last stands in.
        kept[index] = _shown(frame, (width, height), small, turn)
    indices = [min(i, index) for i in wanted]
    return Frames(np.stack([kept[i] for i in indices]), indices, total, fps)
