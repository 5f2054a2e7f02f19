"""Memory limit of the profile Job, which predicts a model's profile.

The Job makes the largest item that the limits on media allow and runs it through the model's own
processor (frontend/media/largest.py), so its peak follows from those limits. Weights are never
loaded. Pure arithmetic; called by the operator's Job builder.
"""

from __future__ import annotations

from foveal_runtime.plan.config import GIB, ModalitiesConfig

MAX_PROBE_PIXELS = 4_000_000
VIDEO_PROBE_FRAMES = 8
"""Videos are tried with so many frames of at most so many pixels, and grown by arithmetic."""
BASE_BYTES = 2 * GIB
"""The interpreter with torch and the processors: 0.9 GiB measured, and more with device builds."""
BYTES_PER_PIXEL = 96
"""Bytes as decoded, as floats, as patches and as the serialised value: 75 measured with a processor
that shrinks nothing (e2e/results/measurements.md)."""
BYTES_PER_AUDIO_SECOND = 1 << 20
"""Samples, spectrum and features: 0.65 MB measured."""


def profile_memory_bytes(modalities: ModalitiesConfig) -> int:
    """The most that the Job may take, in whole GiB. Grows with every limit."""
    image = modalities.image.max_pixels
    video = min(modalities.video.max_frames, VIDEO_PROBE_FRAMES) * min(
        modalities.video.max_pixels, MAX_PROBE_PIXELS
    )
    items = max(
        BYTES_PER_PIXEL * image,
        BYTES_PER_PIXEL * video,
        int(BYTES_PER_AUDIO_SECOND * modalities.audio.max_seconds),
    )
    return -(-(BASE_BYTES + items) // GIB) * GIB
