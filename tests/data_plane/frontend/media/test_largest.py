"""No picture, video or sound within the limits becomes a larger item than the profile says."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.media.largest import largest_items
from foveal_runtime.frontend.media.processors import ItemProcessor
from foveal_runtime.frontend.media.timed import Frames
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.wire.item import meta_of, read_header
from tests.support import tiny_processors

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

PIXELS = 90_000
LIMITS = ModalitiesConfig(
    image=ModalityLimits(max_pixels=PIXELS),
    video=ModalityLimits(max_pixels=PIXELS, max_frames=20),
    audio=ModalityLimits(max_seconds=45.0),
)
CONTEXT = 100_000


def media(modality: int, rng: random.Random) -> object:
    ratio = 2.0 ** rng.uniform(-3, 3)
    pixels = PIXELS * rng.choice([1, 1, 0.5, 0.1])
    height = max(8, int((pixels / ratio) ** 0.5))
    width = max(8, min(int(pixels / height), PIXELS // height))
    if modality == 0:
        return Image.new("RGB", (width, height), (9, 200, 30))
    if modality == 1:
        count = rng.randint(2, 20)
        return Frames(
            np.full((count, height, width, 3), 99, np.uint8), list(range(count)), count, 2
        )
    return np.sin(np.arange(int(16000 * rng.uniform(1, 45)), dtype=np.float32))


@pytest.mark.parametrize("name", tiny_processors.MAKERS)
def test_nothing_within_the_limits_is_larger(name: str, tmp_path: Path) -> None:
    path = str(tiny_processors.save(name, tmp_path))
    found = largest_items(path, LIMITS, CONTEXT)
    assert found, "the processor's splice is not proven: it is refused, and has no items"
    processor = ItemProcessor(path, LIMITS)
    processor.examine(b"")
    rng = random.Random(7)
    print("seed 7")
    for number, modality in enumerate(("image", "video", "audio")):
        if modality not in found:
            continue
        top = found[modality].profile
        assert top.example
        for _ in range(12):
            value = processor.process(number, media(number, rng), {})
            meta = meta_of(read_header(value))
            assert meta.num_tokens <= top.num_tokens
            assert meta.num_embeds <= top.num_embeds
            assert len(value) <= top.processed_bytes + 4096, "headers may differ by a little"


def test_fixed_and_dynamic_sizes_are_exact(tmp_path: Path) -> None:
    fixed = largest_items(str(tiny_processors.save("llava", tmp_path)), LIMITS, CONTEXT)
    assert fixed["image"].profile.num_embeds == (32 // 8) ** 2
    dynamic = largest_items(str(tiny_processors.save("qwen2_vl", tmp_path)), LIMITS, CONTEXT)
    # 4,096 pixels at most, 8 x 8 pixels a token: 64, were it not for pictures so long that the
    # short side is rounded up to a whole token.
    assert 64 <= dynamic["image"].profile.num_embeds <= 100
    assert dynamic["image"].profile.num_tokens == dynamic["image"].profile.num_embeds


def test_the_largest_item_leaves_room_for_an_answer(tmp_path: Path) -> None:
    """Regression: where a video took just the context, plans refused a model that serves it."""
    path = str(tiny_processors.save("qwen2_vl", tmp_path))
    exact = largest_items(path, LIMITS, CONTEXT)["video"].profile.num_tokens
    assert largest_items(path, LIMITS, exact)["video"].profile.num_tokens < exact


def test_sizes_that_are_rounded_up_count(tmp_path: Path) -> None:
    """LFM2-VL takes 32 x 32 pixels a token and rounds sides to the nearest whole token: 49 x 1,836
    pixels are 2 x 57 tokens, more than in any whole grid of as few pixels."""
    path = str(tiny_processors.save("lfm2_vl", tmp_path))
    assert largest_items(path, LIMITS, CONTEXT)["image"].profile.num_embeds >= 114


def test_tokens_of_rounded_and_tiled_images_are_known(tmp_path: Path) -> None:
    processor = ItemProcessor(str(tiny_processors.save("lfm2_vl", tmp_path)), LIMITS)
    processor.examine(b"")
    sizes = [(300, 200), (49, 1836), (16, 16), (1000, 900)]
    made = [processor.process(0, Image.new("RGB", size[::-1]), {}) for size in sizes]
    assert processor.rule.count is not None
    counts = processor.rule.count(processor.processor, sizes)
    assert counts == [meta_of(read_header(one)).num_tokens for one in made]
    assert max(counts) > 2 * 257, "none was cut into tiles"


def test_positions_of_encoders_are_counted(tmp_path: Path) -> None:
    """Whether a processor makes rows of patches, frames of sound, or pixels for convolutions."""
    found = largest_items(str(tiny_processors.save("gemma4", tmp_path)), LIMITS, CONTEXT)
    assert found["image"].profile.num_patches == 70 * 2 * 2
    sound = found["audio"].profile
    assert 2 * sound.num_embeds - 4 <= sound.num_patches <= 2 * sound.num_embeds
    path = tiny_processors.save("gemma3n", tmp_path)
    config = {"model_type": "gemma3n", "vision_config": {"architecture": "resnet50"}}
    (path / "config.json").write_text(json.dumps(config))
    assert largest_items(str(path), LIMITS, CONTEXT)["image"].profile.num_patches == 2 * 2


def test_patches_that_the_configuration_leaves_to_its_family_are_counted(tmp_path: Path) -> None:
    """Configurations of older transformers name only what differs from the family's defaults."""
    path = tiny_processors.save("llava", tmp_path)
    vision = {"model_type": "clip_vision_model", "image_size": 32}
    counted = []
    for more in ({}, {"patch_size": 32}, {"patch_size": 8}, {"patch_size": None}):
        config = {"model_type": "llava", "vision_config": {**vision, **more}}
        (path / "config.json").write_text(json.dumps(config))
        counted.append(largest_items(str(path), LIMITS, CONTEXT)["image"].profile.num_patches)
    assert counted == [1, 1, 16, 0], "patches of 32 pixels are the default of CLIP"


def test_items_longer_than_the_context_do_not_count(tmp_path: Path) -> None:
    path = str(tiny_processors.save("qwen2_vl", tmp_path))
    short = largest_items(path, LIMITS, 40)
    assert 30 <= short["image"].profile.num_tokens <= 40
    assert short["video"].profile.num_tokens <= 40


def test_modalities_that_are_off_are_left_out(tmp_path: Path) -> None:
    path = str(tiny_processors.save("qwen2_vl", tmp_path))
    limits = ModalitiesConfig(video=ModalityLimits(max_per_prompt=0))
    assert set(largest_items(path, limits, CONTEXT)) == {"image"}
