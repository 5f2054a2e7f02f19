"""Encoder outputs: batching, counts, the store's moves, and failures that stay with one item."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from foveal_runtime.engine.types.step import EncoderInput, StepPlan
from foveal_runtime.model.adapters import ADAPTERS
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.device import Device
from foveal_runtime.model.runner.encoder import (
    EncoderRunner,
    EncoderStore,
    InterruptionFailed,
    check_grid,
    field_tensor,
    split_rows,
)
from foveal_runtime.wire.item import BadItem, Item, pack_item, view_item
from tests.support.models.step_driver import embeds_on_device

CPU = Device(torch.device("cpu"))


@pytest.fixture
def encoder(tiny):
    def make(name: str) -> tuple[EncoderRunner, EncoderStore]:
        store = EncoderStore(CPU)
        return EncoderRunner(load_model(str(tiny(name))), store, CPU), store

    return make


def llava_input(mm_hash: bytes, pixels: np.ndarray, num_embeds: int = 16) -> EncoderInput:
    value = pack_item(0, (3,) * num_embeds, ((0, num_embeds),), {"pixel_values": pixels_of(pixels)})
    return EncoderInput(mm_hash, 0, num_embeds, value)


def pixels_of(pixels: np.ndarray) -> tuple[str, np.ndarray]:
    return str(pixels.dtype), pixels


def image(seed: int, size: int = 16) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, size, size), dtype=np.float32)


@torch.inference_mode()
def test_a_batch_equals_items_alone(encoder) -> None:
    runner, store = encoder("llava")
    runner.encode([llava_input(bytes([i]), image(i)) for i in range(3)])
    together = [store.lookup(bytes([i])) for i in range(3)]
    for i in range(3):
        runner.encode([llava_input(b"alone", image(i))])
        torch.testing.assert_close(store.lookup(b"alone"), together[i], rtol=0, atol=1e-6)
        assert together[i].shape == (1, 16, 32)
    assert embeds_on_device(store) == 4 * 16
    store.check_integrity()


@torch.inference_mode()
def test_encoding_lets_others_in_between_layers_and_changes_nothing(encoder) -> None:
    runner, store = encoder("llava")
    items = [llava_input(b"one", image(1)), llava_input(b"two", image(2))]
    assert runner.encode(items) == 0.0
    before = [store.lookup(item.mm_hash) for item in items]
    num_let_in = 0

    def between() -> None:
        nonlocal num_let_in
        num_let_in += 1

    assert runner.encode(items, slice_seconds=1e-9, between=between) > 0
    for item, output in zip(items, before, strict=True):
        assert torch.equal(store.lookup(item.mm_hash), output)
    tower = runner._core.vision_tower
    layers = sum(len(m) for m in tower.modules() if isinstance(m, torch.nn.ModuleList))
    assert num_let_in == layers + 2, "before the batch and each layer, and after all"
    runner.encode(items, slice_seconds=1e6, between=between)
    assert num_let_in == layers + 3, "no slice was over, and then all were"


@torch.inference_mode()
def test_what_fails_in_between_is_no_items_fault(encoder) -> None:
    runner, store = encoder("llava")

    def between() -> None:
        raise RuntimeError("a step failed")

    with pytest.raises(InterruptionFailed, match="RuntimeError: a step failed"):
        runner.encode([llava_input(b"one", image(1))], slice_seconds=1e-9, between=between)
    assert store.lookup_failure(b"one") == "its encoder output is not on the device"


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
@torch.inference_mode()
def test_given_outputs_are_what_the_encoder_would_have_made(encoder, tiny, name) -> None:
    """All levels of them, each beside the others; a wrong shape fails alone."""
    runner, store = encoder(name)
    width = runner._width * runner._levels
    rows = np.random.default_rng(3).standard_normal((1, 6, width), dtype=np.float32)

    def given(mm_hash: bytes, values: np.ndarray, num_embeds: int = 6) -> EncoderInput:
        fields = {"image_embeds": (str(values.dtype), values)}
        value = pack_item(0, (3,) * num_embeds, ((0, num_embeds),), fields)
        return EncoderInput(mm_hash, 0, num_embeds, value)

    runner.encode(
        [
            given(b"good", rows),
            given(b"narrow", rows[:, :, 1:]),
            given(b"count", rows, 5),
            given(b"kind", rows.astype(np.int64)),
        ]
    )
    output = store.lookup(b"good")
    assert output.shape == (runner._levels, 6, runner._width)
    together = torch.cat(list(output), dim=-1)
    torch.testing.assert_close(together, torch.from_numpy(rows[0]).to(output.dtype), rtol=0, atol=0)
    for bad in (b"narrow", b"count", b"kind"):
        assert "are needed" in store.lookup_failure(bad)
    store.check_integrity()


@torch.inference_mode()
def test_a_bad_item_fails_alone(encoder) -> None:
    """Wrong count, wrong shape, missing field, not an item, a modality the model has not."""
    runner, store = encoder("llava")
    good = llava_input(b"good", image(1))
    no_field = EncoderInput(b"no field", 0, 1, pack_item(0, (3,), ((0, 1),), {}))
    runner.encode(
        [
            llava_input(b"count", image(2), num_embeds=15),
            good,
            llava_input(b"shape", image(3, size=10)),
            no_field,
            EncoderInput(b"bytes", 0, 16, b"FMI1 and then nothing"),
            EncoderInput(b"sound", 2, 16, good.value),
        ]
    )
    assert store.lookup(b"good") is not None
    assert "16 embeddings, 15 expected" in store.lookup_failure(b"count")
    assert "encoder" in store.lookup_failure(b"shape")
    assert "lacks the field pixel_values" in store.lookup_failure(b"no field")
    assert "header" in store.lookup_failure(b"bytes")
    assert "takes no audio" in store.lookup_failure(b"sound")
    store.check_integrity()


@pytest.mark.parametrize(
    ("name", "dtype", "array", "says"),
    [
        ("image_merge_sizes", "int64", np.zeros(0, np.int64), "int64 [0]"),
        ("image_merge_sizes", "float32", np.array([np.nan], np.float32), "float32 [1]"),
        ("image_merge_sizes", "float32", np.array([np.inf], np.float32), "float32 [1]"),
        ("image_grid_thw", "int64", np.array([1, 4, 4]), "shape [3]"),
        ("image_grid_thw", "float32", np.array([[1, np.nan, 4]], np.float32), "does not make"),
    ],
)
def test_a_grid_of_another_kind_is_the_items_fault(
    name: str, dtype: str, array: np.ndarray, says: str
) -> None:
    """It was read before anything was caught, and so ended the engine."""
    spec = ADAPTERS["video_llama_3"].encoders["image"]
    fields = {
        "image_grid_thw": ("int64", np.array([[1, 4, 4]])),
        "image_merge_sizes": ("int64", np.array([2])),
    }
    good = view_item(pack_item(0, (3,) * 4, ((0, 4),), fields))
    check_grid(good, spec, 4, None)
    bad = view_item(pack_item(0, (3,) * 4, ((0, 4),), {**fields, name: (dtype, array)}))
    with pytest.raises(BadItem, match=re.escape(says)):
        check_grid(bad, spec, 4, None)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ([[4, 8]], "[[4, 8]] does not make 4 embeddings"),
        ([[8, 6], [2, 8]], "does not make 4 embeddings"),
        ([4, 16], "shape [2]; [2, 2] is needed"),
        ([[1, 8, 8]], "shape [1, 3]; [1, 2] is needed"),
    ],
)
def test_sizes_of_slices_make_as_many_embeddings_as_the_prompt_has(sizes, says: str) -> None:
    spec = ADAPTERS["minicpmv4_7"].encoders["image"]

    def item(sizes: list) -> Item:
        fields = {"target_sizes": ("int32", np.array(sizes, np.int32))}
        return view_item(pack_item(0, (3,) * 4, ((0, 4),), fields))

    config = SimpleNamespace(downsample_mode="16x")
    check_grid(item([[4, 8], [8, 4]]), spec, 4, config)
    with pytest.raises(BadItem, match=re.escape(says)):
        check_grid(item(sizes), spec, 4, config)


@torch.inference_mode()
def test_an_all_zero_tile_fails_its_item_only(encoder, checkpoints) -> None:
    """idefics3 takes an all-zero tile for padding and returns fewer rows."""
    runner, store = encoder("idefics3")
    inputs = []
    for number, zero in enumerate((False, True)):
        item = checkpoints.CASES["idefics3"].items[0](3)
        if zero:
            item.fields["pixel_values"][0, 1] = 0.0
        fields = {
            k: (str(v.dtype).removeprefix("torch."), v.numpy()) for k, v in item.fields.items()
        }
        value = pack_item(0, tuple(item.ids), item.embed_runs, fields)
        inputs.append(EncoderInput(bytes([number]), 0, 12, value))
    runner.encode(inputs)
    assert store.lookup(b"\0") is not None
    assert "8 embeddings, 12 expected" in store.lookup_failure(b"\1")


def test_bfloat16_fields_keep_their_bits() -> None:
    wanted = torch.randn(2, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    bits = wanted.view(torch.uint16).numpy()
    item = view_item(pack_item(0, (), (), {"x": ("bfloat16", bits)}))
    both = field_tensor([item, item], "x")
    assert both.dtype == torch.bfloat16
    assert torch.equal(both, torch.cat([wanted, wanted]))


def test_store_obeys_the_plan() -> None:
    store = EncoderStore(CPU)
    output = torch.randn(1, 4, 8)
    store.put(b"a", output)
    store.obey(StepPlan(0, store_encoder=[b"a"], free_encoder=[b"a"]))
    assert store.lookup(b"a") is None
    store.obey(StepPlan(1, load_encoder=[b"a"]))
    assert torch.equal(store.lookup(b"a"), output)
    store.obey(StepPlan(2, free_encoder=[b"a"], drop_host_encoder=[b"a"]))
    store.obey(StepPlan(3, load_encoder=[b"a"]))
    assert store.lookup(b"a") is None
    assert "host tier" in store.lookup_failure(b"a")
    store.obey(StepPlan(4, free_encoder=[b"a"]))
    assert "not on the device" in store.lookup_failure(b"a")
    store.check_integrity()


def test_split_rows_takes_every_shape_that_families_return() -> None:
    flat = torch.arange(12.0).reshape(6, 2)
    for output in (
        [flat[:4], flat[4:]],
        (flat[:4], flat[4:]),
        flat,
        flat.reshape(3, 2, 2),
        [flat[:2], flat[2:4], flat[4:]],
    ):
        rows = split_rows(output, [4, 2])
        assert torch.equal(rows[0], flat[:4])
        assert torch.equal(rows[1], flat[4:])
    with pytest.raises(ValueError, match="2 embeddings, 4 expected"):
        split_rows([flat[:2], flat[2:]], [4, 2])
