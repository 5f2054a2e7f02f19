"""The frames of a video that a processor takes, chosen before any is kept.

Used by `processors` in media workers, and by `options`, which refuses what a processor would pass
over in silence. A processor's own rule decides; only what it cannot do alone is added here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

SAMPLING = ("num_frames", "fps", "min_frames", "max_frames")
"""Options that choose frames, each in the processors that heed it (`sampling_options`)."""


def sample_frames(video: Any, metadata: Any, asked: Mapping[str, Any]) -> list[int]:
    """Indices of the frames that a video processor takes of a video, told what is asked for, else
    what the checkpoint sets. Where one of num_frames and fps is asked for, a setting of the other
    would win or be refused. Raises ValueError or ArithmeticError."""
    if "num_frames" in asked or "fps" in asked:
        video = copy.copy(video)
        video.num_frames = video.fps = None
    else:
        names = (name for name in SAMPLING[:2] if getattr(video, name, None) is not None)
        asked = {**{name: getattr(video, name) for name in itertools.islice(names, 1)}, **asked}
    chosen = video.sample_frames(metadata, **asked)
    return [int(index) for index in np.asarray(chosen).reshape(-1)]


@lru_cache(maxsize=4)
def sampling_options(video: Any) -> frozenset[str]:
    """Those of `SAMPLING` that change which frames it takes: a processor takes the others, too,
    and what is asked for would not be what the model sees."""
    from transformers.video_utils import VideoMetadata

    def differ(one: dict[str, float], other: dict[str, float]) -> bool:
        metadata = VideoMetadata(total_num_frames=1200, fps=10.0, duration=120.0)
        try:
            found = [sample_frames(video, metadata, asked) for asked in (one, other)]
        except Exception:  # a foreign processor raises anything where it knows no such option
            return False
        return found[0] != found[1]

    trials: dict[str, tuple[dict[str, float], dict[str, float]]] = {
        "num_frames": ({"num_frames": 8}, {"num_frames": 16}),
        "fps": ({"fps": 0.5}, {"fps": 0.25}),
        "min_frames": ({"fps": 0.01, "min_frames": 8}, {"fps": 0.01, "min_frames": 16}),
        "max_frames": ({"fps": 1, "max_frames": 8}, {"fps": 1, "max_frames": 16}),
    }
    return frozenset(name for name, (one, other) in trials.items() if differ(one, other))


def choose_frames(
    video: Any,
    options: Mapping[str, Any],
    most: int,
    total: int,
    fps: float,
    width: int,
    height: int,
) -> list[int]:
    """Ascending indices, by the processor's own rule, told what the request asks for; without a
    requested num_frames or fps at most `most` of them, evenly spread. Of a video that is too short
    for the checkpoint's rule all are taken. Raises ValueError or ArithmeticError where it is too
    short for what is asked for."""
    from transformers.video_utils import VideoMetadata

    if total == 1:
        return [0]
    metadata = VideoMetadata(
        total_num_frames=total, fps=fps, duration=total / fps, width=width, height=height
    )
    asked = asked_for(options)
    is_exact = "num_frames" in asked or "fps" in asked
    if not is_exact and not getattr(video, "do_sample_frames", False):
        return spread(range(total), min(most, int(asked.get("max_frames", most))))
    try:
        frames = sample_frames(video, metadata, asked)
    except (ValueError, ArithmeticError):
        if asked:
            raise
        frames = list(range(total))
    return frames if is_exact else spread(frames, most)


def asked_for(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a request's options that choose frames."""
    return {name: options[name] for name in SAMPLING if options.get(name) is not None}


def spread(indices: Sequence[int], most: int) -> list[int]:
    """At most `most` of them, evenly spread over the whole."""
    count = len(indices)
    if count <= most:
        return list(indices)
    return [indices[(2 * i + 1) * count // (2 * most)] for i in range(most)]
