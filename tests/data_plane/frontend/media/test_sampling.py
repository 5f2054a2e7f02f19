"""Frames of a video: what a request asks for is what the model sees, or is refused by name."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from foveal_runtime.frontend.media.hashing import decode_data_url
from foveal_runtime.plan.errors import InvalidRequest
from foveal_runtime.wire.item import view_item
from tests.support.media_files import mp4

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

Loaded = Callable[[str], Any]


def video(num_frames: int) -> bytes:
    return mp4(num_frames, rate=10, step=4)


@pytest.mark.parametrize(
    ("name", "options", "indices"),
    [
        ("gemma4", {"fps": 1}, [0, 10, 20, 30, 40, 50]),  # the checkpoint sets num_frames
        ("qwen3_vl", {"num_frames": 3}, [0, 30, 59]),  # the checkpoint sets fps
        ("qwen2_vl", {"fps": 5, "max_frames": 4}, [0, 15, 30, 45]),
        ("qwen2_vl", {"max_frames": 4}, [7, 22, 37, 52]),
        ("glm4v", {"fps": 1}, [0, 10, 20, 30, 40, 50]),
    ],
)
def test_options_choose_the_frames(
    loaded: Loaded, name: str, options: dict[str, Any], indices: list[int]
) -> None:
    """`fps` of Gemma 4 and `max_frames` of Qwen2-VL were passed over in silence."""
    assert loaded(name)[0].decode(1, video(60), options).indices == indices


@pytest.mark.parametrize(
    ("name", "option"), [("glm4v", "num_frames"), ("glm46v", "fps"), ("qwen3_vl", "max_frames")]
)
def test_options_that_choose_nothing_are_refused(loaded: Loaded, name: str, option: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{option} is not an option"):
        loaded(name)[0].decode(1, video(60), {option: 4})


@pytest.mark.parametrize("num_frames", [1, 8])
def test_what_cannot_be_sampled_names_the_option(loaded: Loaded, num_frames: int) -> None:
    """It was said that the video cannot be read."""
    with pytest.raises(InvalidRequest, match="3 frames cannot be sampled so") as caught:
        loaded("qwen2_vl")[0].decode(1, video(3), {"num_frames": num_frames})
    assert caught.value.param == "mm_processor_kwargs.num_frames"


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v", "gemma4"])
@pytest.mark.parametrize("num_frames", [1, 2, 3])
def test_short_videos_are_taken_whole(loaded: Loaded, name: str, num_frames: int) -> None:
    processor = loaded(name)[0]
    frames = processor.decode(1, video(num_frames), {})
    assert set(frames.indices) == ({0} if name == "glm4v" else set(range(num_frames)))
    assert view_item(processor.process(1, frames, {})).header.embed_runs


def test_one_image_is_a_video_too(loaded: Loaded) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (48, 32), (10, 20, 30)).save(buffer, "PNG")
    url = "data:video/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
    processor = loaded("qwen3_vl")[0]
    frames = processor.decode(1, decode_data_url(url, max_bytes=1 << 20), {})
    assert frames.pixels.shape == (2, 32, 48, 3)
    assert (frames.pixels == (10, 20, 30)).all()
    assert view_item(processor.process(1, frames, {})).header.embed_runs
