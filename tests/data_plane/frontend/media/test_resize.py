"""A deployment-wide size of images and frames shrinks what is larger instead of refusing it."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import msgspec
import pytest
from PIL import Image

from foveal_runtime.frontend.media.decode import decode_image, fitted
from foveal_runtime.frontend.media.processors import ItemProcessor
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import MediaTooLarge
from tests.support import tiny_processors

LIMITS = ModalityLimits(max_pixels=100_000, resize_pixels=10_000)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 90, 200)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("size", [(200, 100), (100, 200), (310, 310), (900, 100), (100_000, 1)])
def test_a_larger_image_is_shrunk_in_its_own_proportions(size: tuple[int, int]) -> None:
    image = decode_image(png(*size), LIMITS)
    assert image.width * image.height <= LIMITS.resize_pixels
    assert (image.width > image.height) == (size[0] > size[1])
    if min(size) > 1:
        assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.05)
        assert image.width * image.height > 0.9 * LIMITS.resize_pixels


def test_a_smaller_image_stays_as_it_is_and_the_limit_still_refuses() -> None:
    assert decode_image(png(100, 100), LIMITS).size == (100, 100)
    with pytest.raises(MediaTooLarge):
        decode_image(png(400, 400), LIMITS)
    assert fitted(4000, 3000, 0) == (4000, 3000)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_items_of_another_size_are_other_items(tmp_path: Path) -> None:
    """Their keys differ, or a cache would give an image of the wrong size."""
    path = str(tiny_processors.save("llava", tmp_path))
    plain, small = ModalitiesConfig(), ModalitiesConfig(image=LIMITS)
    identities = [ItemProcessor(path, limits)._identity(b"") for limits in (plain, plain, small)]
    assert identities[0] == identities[1] != identities[2]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_of_a_long_video_evenly_spread_frames_are_kept(tmp_path: Path) -> None:
    """A video that the processor sampled more frames of than the limit was refused."""
    path = str(tiny_processors.save("qwen2_vl", tmp_path))
    video = msgspec.structs.replace(ModalitiesConfig().video, max_frames=8)
    processor = ItemProcessor(path, ModalitiesConfig(video=video))
    chosen = processor._choose_frames({}, 3000, 30.0, 64, 64)
    assert len(chosen) == 8
    gaps = [later - earlier for earlier, later in itertools.pairwise(chosen)]
    assert min(gaps) > 300
    # What a request asks for is not changed: the limit refuses it by name.
    assert len(processor._choose_frames({"num_frames": 16}, 3000, 30.0, 64, 64)) == 16
