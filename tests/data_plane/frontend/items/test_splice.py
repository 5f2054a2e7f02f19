"""Real processors: items processed alone and spliced give the full processor's prompt and tensors.

Every family is a tiny instance of its real class. What the engine rebuilds from unexpanded ids must
be what the processor itself would have made, or caches would serve another prompt than a miss.
"""

import json

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.items.placement import complete_prompt, match_placeholders
from foveal_runtime.frontend.items.prepared import MediaPart
from foveal_runtime.frontend.media.rules import surround
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import MediaInvalid
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire.item import view_item
from tests.support.media_files import mp4, png, wav

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors

IMAGES = [
    "llava", "llava_next", "llava_onevision", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl",
    "glm4v", "idefics3", "smolvlm", "internvl", "gemma3", "paligemma", "glm46v", "exaone4_5",
    "paddleocr_vl", "deepseek_vl", "janus", "video_llava", "llava_next_video",
    "gemma3n", "gemma4", "gemma4_unified", "lfm3_vl", "cohere_compass", "deepseek_ocr2",
    "granite_docling", "ovis2", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr",
    "fast_vlm", "perception_lm", "hunyuan_vl", "ernie4_5_vl_moe", "step3p7",
    "granite4_vision", "nemotron_h_omni", "qwen2_5_omni", "qwen3_omni_moe",
]  # fmt: skip
VIDEOS = [
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "gemma4", "gemma4_unified", "lfm3_vl",
    "cohere_compass", "minicpmv4_6", "minicpmv4_7", "minicpm_ocr", "perception_lm",
    "qwen2_5_omni", "qwen3_omni_moe",
]  # fmt: skip
SOUNDS = ["qwen2_audio", "audioflamingo3", "gemma3n", "gemma4", "gemma4_unified",
          "moss_transcribe_diarize", "nemotron_h_omni", "nemo_speechlm", "qwen2_5_omni",
          "qwen3_omni_moe"]  # fmt: skip
SAME_FIELDS = {
    "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "internvl", "gemma3", "gemma4",
    "gemma4_unified",
}  # fmt: skip
ONE_ITEM = {"llava_onevision", "audioflamingo3", "nemo_speechlm"}


def full_call(processor, modality: int, media: list, text: str) -> dict:
    """transformers' own way, all items at once."""
    if modality == 1:
        from foveal_runtime.frontend.media.processors import _videos

        kwargs = _videos(media, {})
    else:
        kwargs = {("images", "", "audio")[modality]: media}
    return dict(processor.processor(text=[text], return_tensors="pt", **kwargs))


def check(loaded, name: str, modality: int, files: list[bytes], text: str) -> None:
    processor, info = loaded(name)
    placeholder = info.placeholder(modality)
    assert placeholder is not None, info
    media = [processor.decode(modality, data, {}) for data in files]
    items = [view_item(processor.process(modality, one, {})) for one in media]
    full = full_call(processor, modality, media, text)
    parts = [MediaPart(modality=MODALITIES[modality], data=data) for data in files]
    plain = complete_prompt(info, list(processor.tokenizer(text)["input_ids"]), parts)
    slots = dict(match_placeholders(info, plain, parts))
    spliced: list[int] = []
    for at, token in enumerate(plain):
        spliced.extend(items[slots[at]].header.replacement if at in slots else [token])
    assert spliced == full["input_ids"][0].tolist()
    for item in items:
        ids = np.asarray(item.header.replacement)
        marked = np.zeros(len(ids), bool)
        for start, length in item.header.embed_runs:
            marked[start : start + length] = True
        assert np.array_equal(marked, ids == placeholder.embed_token_id)
    if name in SAME_FIELDS and modality != 2:  # sounds are padded to their neighbours
        for field in items[0].fields:
            alone = np.concatenate([item.fields[field].numpy() for item in items])
            assert np.array_equal(alone, full[field].numpy()), field


SIZES = ((256, 192), (90, 60), (1280, 960), (1024, 192), (192, 1024))
NOT_AS_EMBEDS = {
    "mistral3", "idefics3", "smolvlm", "lfm2_vl", "granite_docling", "ovis2", "minicpmv4_6",
    "minicpmv4_7", "minicpm_ocr", "step3p7", "hunyuan_vl",
}  # fmt: skip
"""Families whose images take several stretches of a prompt, by their size."""


@pytest.mark.parametrize("name", [*IMAGES, "lfm2_vl"])
def test_embeddings_take_the_place_of_their_image(loaded, name):
    """Encoder outputs without their image expand to the same ids and grid as the image itself, or
    are refused: LFM2-VL had the layout of an image that is one tile."""
    from safetensors.numpy import save

    from foveal_runtime.frontend.items.embeds import embeds_item

    processor, info = loaded(name)
    assert info.embeds is not None
    assert bool(info.embeds.reason) == (name in NOT_AS_EMBEDS), info.embeds.reason
    if info.embeds.reason:
        return
    for size in SIZES:
        image = view_item(processor.process(0, processor.decode(0, png(0, *size), {}), {}))
        tensors = {"image_embeds": np.zeros((image.meta.num_embeds, info.embeds.width), "f4")}
        if info.embeds.merge:
            tensors["image_grid_thw"] = image.fields["image_grid_thw"].numpy()
        given = view_item(embeds_item(save(tensors), info))
        assert given.header.replacement == image.header.replacement
        assert given.header.embed_runs == image.header.embed_runs


@pytest.mark.parametrize("name", IMAGES)
def test_items_have_the_fields_that_the_encoder_takes(loaded, name):
    """Regression: Video-LLaVA's processor names its pixels otherwise than its feature method, so
    that every image was refused by the engine."""
    from foveal_runtime.model.adapters import ADAPTERS

    processor, _ = loaded(name)
    item = view_item(processor.process(0, processor.decode(0, png(0, 90, 60), {}), {}))
    assert set(ADAPTERS[name].encoders["image"].fields) <= item.fields.keys()


@pytest.mark.parametrize("name", IMAGES)
def test_images(loaded, name):
    _, info = loaded(name)
    item = info.placeholder_text("image")
    one, two = png(0, 90, 60), png(1, 40, 70)
    check(loaded, name, 0, [one], f"{item}what is it?")
    if name not in ONE_ITEM:
        check(loaded, name, 0, [one, two], f"{item}{item}what is it?")
    if name not in ONE_ITEM | {"paligemma"}:  # which takes its pictures first, wherever they stood
        check(loaded, name, 0, [two, one], f"{item}\nitem 0\n{item}\n\nwhat is it?")


@pytest.mark.parametrize("name", VIDEOS)
def test_videos(loaded, name):
    _, info = loaded(name)
    item = info.placeholder_text("video")
    check(loaded, name, 1, [mp4(8)], f"{item}what is it?")
    other = mp4(8 if name == "perception_lm" else 16)  # it takes videos of one length at a time
    check(loaded, name, 1, [mp4(8), other], f"what {item}\n{item}what is it?")


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds(loaded, name):
    _, info = loaded(name)
    item = info.placeholder_text("audio")
    check(loaded, name, 2, [wav(0.7)], f"{item}what is it?")
    if name not in ONE_ITEM:
        check(loaded, name, 2, [wav(0.7), wav(1.3)], f"{item}{item}what is it?")


def test_voxtral(loaded):
    """Its processor takes whole conversations of Mistral's own tokenizer, so the reference is the
    feature step inside it: 375 embeddings for every started half minute."""
    processor, info = loaded("voxtral")
    assert info.placeholder_text("audio") == "[AUDIO]"
    media = [processor.decode(2, wav(seconds), {}) for seconds in (0.7, 31.0)]
    items = [view_item(processor.process(2, one, {})) for one in media]
    settings = dict(processor.processor.audio_kwargs)
    settings.pop("max_source_positions")
    features = processor.processor._retrieve_input_features(media, 3000, **settings).numpy()
    assert features.shape[0] == 3
    alone = np.concatenate([item.fields["input_features"].numpy() for item in items])
    assert np.array_equal(alone, features)
    assert [item.meta.num_embeds for item in items] == [375, 750]
    assert all(set(item.header.replacement) == {24} for item in items)


@pytest.mark.extended
async def test_a_worker_process_makes_the_same_item(tiny, loaded, tmp_path):
    """The real worker: its own process, the real processor, bytes equal to those made here."""
    from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings

    processor, info = loaded("llava")
    data = png(0, 90, 60)
    pool = MediaWorkers(
        WorkerSettings(
            model_path=str(tiny.save("llava", tmp_path)), namespace=b"n" * 16,
            limits=ModalitiesConfig(), num_workers=1,
        )
    )  # fmt: skip
    try:
        started = await pool.start()
        assert started.identity == info.identity
        assert started.placeholders == info.placeholders
        done = await pool.process(0, b"{}", data)
        assert done.value == processor.process(0, processor.decode(0, data, {}), {})
        with pytest.raises(MediaInvalid):
            await pool.process(0, b"{}", data[:200])
    finally:
        await pool.close()


def test_an_item_does_not_depend_on_its_neighbours(loaded):
    processor, _ = loaded("idefics3")
    small, large = (processor.decode(0, png(i, 40 + 90 * i, 40), {}) for i in (0, 1))
    alone = processor.process(0, small, {})
    processor.process(0, large, {})
    assert processor.process(0, small, {}) == alone


def test_idefics3_markers_take_no_embeddings(loaded):
    """mm_token_type_ids covers the row and column markers too: it must not be used."""
    processor, _ = loaded("idefics3")
    item = view_item(processor.process(0, processor.decode(0, png(0, 90, 60), {}), {}))
    assert item.meta.num_tokens > item.meta.num_embeds
    assert item.meta.num_embeds == item.fields["pixel_values"].shape[1] * 4


def test_what_a_processor_refuses_is_a_clear_error(loaded):
    processor, _ = loaded("qwen2_vl")
    thin = processor.decode(0, png(0, 3000, 4), {})
    with pytest.raises(MediaInvalid, match="Qwen2VLProcessor"):
        processor.process(0, thin, {})


def test_asked_frames_are_sampled(loaded):
    processor, _ = loaded("qwen2_vl")
    few = processor.decode(1, mp4(16), {"num_frames": 4})
    assert len(few.indices) == 4
    item = view_item(processor.process(1, few, {"num_frames": 4}))
    assert item.fields["video_grid_thw"].numpy()[0, 0] == 2


def test_identity_follows_configuration(tiny, tmp_path, loaded):
    from foveal_runtime.frontend.media.processors import ItemProcessor

    _, info = loaded("llava")
    path = tiny.save("llava", tmp_path)
    text = (path / "processor_config.json").read_text()
    (path / "processor_config.json").write_text(text.replace('"resample": 3', '"resample": 2'))
    changed = ItemProcessor(str(path), ModalitiesConfig()).examine(b"n" * 16)
    other_model = ItemProcessor(str(path), ModalitiesConfig()).examine(b"m" * 16)
    assert len({info.identity, changed.identity, other_model.identity}) == 3


COUNTS = {"patch_size": 8, "vision_feature_select_strategy": "x", "num_additional_image_tokens": 1}


@pytest.mark.parametrize("name", ["llava", "llava_next"])
@pytest.mark.parametrize(
    "kept",
    [{}, {"patch_size": 8}, {"patch_size": 8, "vision_feature_select_strategy": None}],
    ids=str,
)
@pytest.mark.parametrize(("strategy", "num_tokens"), [("default", 16), ("full", 17)])
def test_what_older_releases_left_to_the_model_is_read_there(
    name, kept, strategy, num_tokens, tiny, tmp_path
):
    """Images were refused for a sum with None, or took one token less than the tower makes."""
    from foveal_runtime.frontend.media.processors import ItemProcessor

    path = tiny.save(name, tmp_path)
    saved = json.loads((path / "processor_config.json").read_bytes())
    saved = {field: value for field, value in saved.items() if field not in COUNTS} | kept
    (path / "processor_config.json").write_text(json.dumps(saved))
    config = {
        "model_type": name, "vision_feature_select_strategy": strategy,
        "vision_config": {"model_type": "clip_vision_model", "patch_size": 8, "image_size": 32},
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    processor = ItemProcessor(str(path), ModalitiesConfig())
    assert processor.examine(b"n" * 16).placeholder_token_id("image") is not None
    if name == "llava":
        item = view_item(processor.process(0, processor.decode(0, png(1, 32, 32), {}), {}))
        assert item.header.embed_runs == ((0, num_tokens),)
    counted = {field: getattr(processor.processor, field) for field in COUNTS}
    assert counted == COUNTS | {"vision_feature_select_strategy": strategy}


def test_a_modality_switched_off_is_not_examined(tiny, tmp_path):
    from foveal_runtime.frontend.media.processors import ItemProcessor

    path = tiny.save("qwen2_vl", tmp_path)
    limits = ModalitiesConfig(video=ModalityLimits(max_per_prompt=0))
    info = ItemProcessor(str(path), limits).examine(b"n" * 16)
    assert info.placeholder_token_id("video") is None
    assert info.placeholder_token_id("image") is not None


def test_newlines_merge_only_beside_items():
    runs = [10, 11, 12, 13]
    assert surround([1, 10, 5, 10, 10, 2, 10, 10], {5}, runs, 2) == [1, 12, 5, 13, 2, 10, 10]
    assert surround([5, 5], {5}, runs, 2) == [11, 5, 13, 5, 11]
    assert surround([5, 6], {5, 6}, runs, 2) == [11, 5, 13, 6, 11]
    assert surround([5, 13], {5}, runs, 2) == [11, 5, 13, 11]


@pytest.mark.parametrize("name", ["minicpmv4_6", "minicpmv4_7"])
def test_numbers_are_the_prompts_and_not_the_items(loaded, name):
    processor, info = loaded(name)
    names = processor.tokenizer.convert_ids_to_tokens
    written = [names(ids) for ids in info.placeholder(0).numbers[:2]]
    assert written == [["<image_id>", "0", "</image_id>"], ["<image_id>", "1", "</image_id>"]]
    assert len(info.placeholder(0).numbers) == ModalitiesConfig().image.max_per_prompt
    assert bool(info.placeholder(1).numbers) == (name == "minicpmv4_6")
    item = info.placeholder_text("image")
    one, two = png(0, 90, 60), png(1, 40, 70)
    check(loaded, name, 0, [two, one, two], f"{item}{item}what is it?\n{item}")


def test_a_processor_that_is_told_so_numbers_nothing(tiny, tmp_path):
    from foveal_runtime.frontend.media.processors import ItemProcessor

    path = tiny.save("minicpmv4_6", tmp_path)
    text = (path / "processor_config.json").read_text()
    assert text.count('"use_image_id": true') == 2
    text = text.replace('"use_image_id": true', '"use_image_id": false')
    (path / "processor_config.json").write_text(text)
    info = ItemProcessor(str(path), ModalitiesConfig()).examine(b"n" * 16)
    assert info.placeholder(0).numbers == ()
    assert info.placeholder_token_id("image") is not None


@pytest.mark.parametrize("name", sorted({*IMAGES} - {"nemotron_h_omni"}))  # it resizes floats
def test_pictures_travel_short_and_equal_bit_by_bit(loaded, name):
    """What the engine gets from the short form is what the processor made."""
    processor, _ = loaded(name)
    assert any(field.startswith("pixel_values") for field in processor.codebooks)
    rng = np.random.default_rng(3)
    ramp = np.add.outer(np.arange(200), np.arange(150)).astype(np.uint8)
    pictures = [
        rng.integers(0, 256, (64, 64, 3), dtype=np.uint8),
        rng.integers(0, 256, (50, 90, 3), dtype=np.uint8),
        np.stack([ramp, 255 - ramp, ramp // 2], -1),
    ]
    books = processor.codebooks
    for pixels in pictures:
        short = processor.process(0, Image.fromarray(pixels), {})
        try:
            processor.codebooks = None
            whole = processor.process(0, Image.fromarray(pixels), {})
        finally:
            processor.codebooks = books
        assert len(short) < 0.6 * len(whole)
        one, other = view_item(short), view_item(whole)
        assert one.header.replacement == other.header.replacement
        assert one.fields.keys() == other.fields.keys()
        for field in one.fields:
            got, made = one.fields[field].numpy(), other.fields[field].numpy()
            assert (got.dtype, got.shape) == (made.dtype, made.shape)
            assert got.tobytes() == made.tobytes()
