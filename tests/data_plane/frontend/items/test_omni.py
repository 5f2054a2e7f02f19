"""Items of Qwen's Omni families: times of frames, lengths of sounds, and what stays apart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foveal_runtime.frontend.media.processors import ItemProcessor
from foveal_runtime.frontend.media.timed import Frames
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import InvalidRequest, MediaTooLarge
from foveal_runtime.wire.item import view_item
from tests.support.media_files import mp4, wav

NAMES = ["qwen2_5_omni", "qwen3_omni_moe"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "seconds"), [({}, 0.5), ({"fps": 2}, 1.0), ({"num_frames": 4}, 2.0)]
)
def test_times_are_those_of_the_frames(loaded, name, options, seconds):
    """Four frames a second for four seconds, all of them or fewer; these processors would take
    videos for ones of two frames a second (one, Qwen 3), whatever was sampled."""
    processor, _ = loaded(name)
    video = processor.decode(1, mp4(16), options)
    item = view_item(processor.process(1, video, options))
    assert item.fields["video_second_per_grid"].numpy().tolist() == [seconds]
    grid = item.fields["video_grid_thw"].numpy()[0]
    assert grid[0] * seconds == 4.0


@pytest.mark.parametrize("name", NAMES)
def test_long_videos_are_told_apart_from_short_ones(loaded, name):
    processor, _ = loaded(name)
    pixels = np.zeros((4, 32, 48, 3), np.uint8)
    found = [
        view_item(processor.process(1, Frames(pixels, [0, n, 2 * n, 3 * n], 4 * n, 30.0), {}))
        for n in (3, 300)
    ]
    seconds = [item.fields["video_second_per_grid"].numpy().item() for item in found]
    assert seconds == pytest.approx([0.2, 20.0])


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_weighs_what_is_heard(loaded, name):
    """Regression: each sound was five minutes long, 15 MB of the published model's."""
    processor, _ = loaded(name)
    samples = processor.decode(2, wav(1.3), {})
    item = view_item(processor.process(2, samples, {}))
    features, mask = (
        item.fields[field].numpy() for field in ("input_features", "feature_attention_mask")
    )
    assert features.shape == (1, 8, 130)
    assert mask.tolist() == [[1] * 130]
    whole = processor.processor(
        text=["<|AUDIO|>"], audio=[samples], return_tensors="pt"
    )["input_features"].numpy()  # fmt: skip
    assert np.array_equal(features, whole[..., :130])


def test_what_is_cut_off_is_refused(loaded):
    """Qwen 2.5's ends where its extractor does; Qwen 3's takes all."""
    processor, _ = loaded("qwen2_5_omni")
    with pytest.raises(MediaTooLarge, match="hears no more than 30 s"):
        processor.decode(2, wav(31.0), {})
    processor, _ = loaded("qwen3_omni_moe")
    assert len(processor.decode(2, wav(31.0), {})) == 31 * 16000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["use_audio_in_video", "load_audio_from_video"])
def test_the_sound_of_a_video_is_a_part_of_its_own(loaded, name, option):
    processor, _ = loaded(name)
    with pytest.raises(InvalidRequest, match=f"{option} is not supported: send a video's sound"):
        processor.decode(1, mp4(8), {option: True})
    off = processor.process(1, processor.decode(1, mp4(8), {option: False}), {option: False})
    assert off == processor.process(1, processor.decode(1, mp4(8), {}), {})
    with pytest.raises(InvalidRequest, match="is not an option"):
        loaded("qwen2_vl")[0].decode(1, mp4(8), {option: False})


@pytest.mark.parametrize(("name", "most"), [("qwen2_5_omni", 602_112), ("qwen3_omni_moe", 786_432)])
def test_frames_get_no_larger_than_the_processor_makes_them(tiny, tmp_path, name, most):
    """Regression: published files name a size that these processors replace by one of their own,
    and a request could ask for frames up to the former."""
    path = tiny.save(name, tmp_path)
    saved = json.loads((path / "processor_config.json").read_bytes())
    saved["video_processor"]["size"] = {"shortest_edge": 3136, "longest_edge": 12_845_056}
    (path / "processor_config.json").write_text(json.dumps(saved))
    processor = ItemProcessor(str(path), ModalitiesConfig())
    size = {"shortest_edge": 3136, "longest_edge": most}
    assert processor.decode(1, mp4(8), {"size": size}).total == 8
    with pytest.raises(InvalidRequest, match=f"'longest_edge': {most}"):
        processor.decode(1, mp4(8), {"size": {**size, "longest_edge": most + 1}})
