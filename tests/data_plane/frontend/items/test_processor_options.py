"""Real processors: what a request's options change, and which are the model's own."""

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.media.options import by_modality
from foveal_runtime.plan.errors import InvalidRequest
from foveal_runtime.wire.item import view_item
from tests.support.media_files import mp4, png, wav

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors


def test_processor_options_change_the_item(loaded):
    processor, _ = loaded("qwen2_vl")
    image = processor.decode(0, png(0, 90, 60), {})
    size = {"size": {"shortest_edge": 64, "longest_edge": 1024}}
    small, usual = (view_item(processor.process(0, image, o)) for o in (size, {}))
    assert small.meta.num_embeds < usual.meta.num_embeds


def test_an_image_beside_a_video_gets_none_of_its_options(loaded):
    processor, info = loaded("qwen2_5_vl")
    given = {"fps": 2, "do_rescale": True}
    own = by_modality(given, {0, 1}, info.options)
    assert own == {0: {"do_rescale": True}, 1: given}
    processor.decode(0, png(0, 64, 64), own[0])
    processor.decode(1, mp4(8), own[1])
    with pytest.raises(InvalidRequest, match=r"fps is not an option"):
        processor.decode(0, png(0, 64, 64), by_modality(given, {0}, info.options)[0])


def test_options_that_are_not_the_users(loaded):
    processor, _ = loaded("llava")
    image = processor.decode(0, png(0, 9, 9), {})
    for name in ("text", "images", "return_tensors", "device"):
        with pytest.raises(InvalidRequest, match=name):
            processor.process(0, image, {name: "x"})


GEOMETRY = {
    "qwen2_vl": ({"merge_size": 1}, {"patch_size": 2}, {"temporal_patch_size": 1}),
    "gemma4": ({"pooling_kernel_size": 1},),
    "gemma3": ({"size": {"height": 16, "width": 16}},),
    "llava": ({"crop_size": {"height": 16, "width": 16}}, {"input_data_format": "channels_last"}),
    "llava_next": ({"image_grid_pinpoints": [[64, 64]]},),
    "idefics3": ({"max_image_size": {"longest_edge": 16}},),
    "lfm2_vl": ({"downsample_factor": 1}, {"encoder_patch_size": 8}, {"tile_size": 256}),
    "granite_docling": ({"fine_route": True},),
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_options_may_not_contradict_the_weights(loaded, name):
    """`merge_size: 1` put the patches of an image into another order, and a 200 described that;
    other sizes failed in the engine. What says no more than the model does is taken."""
    processor, _ = loaded(name)
    image, part = png(0, 90, 60), processor.processor.image_processor
    for given in GEOMETRY[name]:
        (option,) = given
        with pytest.raises(InvalidRequest, match=f"{option} is the model's own") as caught:
            processor.decode(0, image, given)
        assert caught.value.param == f"mm_processor_kwargs.{option}"
        processor.decode(0, image, {option: part.to_dict().get(option)})


def test_options_that_nothing_reads_are_refused(loaded):
    """Attributes of an extractor that its call does not take changed nothing."""
    sound, _ = loaded("voxtral")
    with pytest.raises(InvalidRequest, match="hop_length is not an option"):
        sound.decode(2, wav(0.7), {"hop_length": 80})
    media = sound.decode(2, wav(0.7), {"sampling_rate": 16000, "do_normalize": True})
    with pytest.raises(InvalidRequest, match="max_source_positions is the model's own"):
        sound.decode(2, wav(0.7), {"max_source_positions": 1500})
    plain, normal = (sound.process(2, media, {"do_normalize": on}) for on in (False, True))
    assert plain == sound.process(2, media, {})
    assert plain != normal


@pytest.mark.parametrize("options", [{"use_image_id": False}, {"downsample_mode": "4x"}], ids=str)
def test_a_request_changes_neither_numbers_nor_how_many_patches_merge(loaded, options):
    """The prompt's numbers are made without the request, and the model merges as it is set up."""
    processor, _ = loaded("minicpmv4_6")
    with pytest.raises(InvalidRequest, match=next(iter(options))):
        processor.decode(0, png(0, 90, 60), options)


def test_options_that_change_the_arithmetic_are_stored_as_processed(loaded):
    processor, _ = loaded("llava")
    picture = Image.fromarray(np.full((40, 40, 3), 77, np.uint8))
    for options in ({"do_normalize": False}, {"image_mean": [0.1, 0.2, 0.3]}):
        value = processor.process(0, picture, options)
        pixels = view_item(value).fields["pixel_values"]
        assert pixels.palette is None
        assert pixels.numpy().shape == (1, 3, 32, 32)
