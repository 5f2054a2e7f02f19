"""What of a profile holds for a resource: limits on media, modalities, devices, windows.

The profile is the committed one of Qwen2.5-VL-7B, so these are the figures that a user gets.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from foveal_runtime.plan.budget.planner import draft, plan
from foveal_runtime.plan.budget.types import BudgetInputs, BudgetPlan
from foveal_runtime.plan.config import GIB, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.profile import ModelProfile, decode
from tests.support.budget_samples import TEXT, VLM, gpu, reasons

PROFILES = Path(__file__).parents[3] / "examples/profiles"
QWEN: ModelProfile = decode((PROFILES / "qwen2.5-vl-7b.json").read_bytes())
DEFAULTS = ModalitiesConfig()
OFF = ModalityLimits(max_per_prompt=0)


def limited(inputs: BudgetInputs, **modalities: ModalityLimits) -> BudgetInputs:
    changed = msgspec.structs.replace(inputs.modalities, **modalities)
    return msgspec.structs.replace(inputs, modalities=changed)


def device(result: BudgetPlan, line: str) -> int:
    assert result.device is not None
    return result.device.line(line).bytes


def test_a_modality_that_is_off_costs_nothing() -> None:
    """An image-only Qwen2.5-VL-7B paid 19.25 GiB for videos that it refused."""
    costly = msgspec.structs.replace(
        QWEN.items["video"], num_embeds=128_000, num_tokens=128_000, num_patches=512_000
    )
    profile = msgspec.structs.replace(QWEN, items={**QWEN.items, "video": costly})
    both = draft(gpu(), profile)
    image = draft(limited(gpu(), video=OFF), profile)
    text = draft(limited(gpu(), video=OFF, image=OFF), profile)
    assert device(both, "activations") > 18 * GIB
    assert device(image, "activations") < 3 * GIB
    assert device(text, "activations") < device(image, "activations")
    assert text.encoder_embeds == 0


def test_encoders_are_counted_by_their_patches() -> None:
    """Gemma 3 makes 256 embeddings of 4,096 patches; only the embeddings were counted."""
    item = QWEN.items["image"]
    dense = msgspec.structs.replace(item, num_patches=16 * item.num_patches)
    many = msgspec.structs.replace(QWEN, items={"image": dense})
    few = msgspec.structs.replace(QWEN, items={"image": item})
    ratio = device(draft(gpu(), many), "activations") / device(draft(gpu(), few), "activations")
    assert 13 < ratio < 16


def test_smaller_images_take_their_own_figures() -> None:
    small = ModalityLimits(resize_pixels=802_816)
    result = draft(limited(gpu(), image=small, video=OFF), QWEN)
    assert result.ipc_staging_bytes < draft(limited(gpu(), video=OFF), QWEN).ipc_staging_bytes
    assert result.encoder_embeds == 16 * 1168  # one request's images
    assert not result.notes
    # Between two limits that the profile has, the larger one's figures are a bound.
    between = draft(limited(gpu(), image=ModalityLimits(max_pixels=900_000), video=OFF), QWEN)
    assert "upper bounds" in between.notes[0]


def test_shrinking_and_refusing_at_the_same_size_cost_the_same() -> None:
    shrunk = draft(limited(gpu(), image=ModalityLimits(resize_pixels=802_816), video=OFF), QWEN)
    refused = draft(limited(gpu(), image=ModalityLimits(max_pixels=802_816), video=OFF), QWEN)
    assert shrunk.device == refused.device


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        ({"image": ModalityLimits(max_pixels=100_000_000)}, "--max-pixels 100000000"),
        ({"video": msgspec.structs.replace(DEFAULTS.video, max_frames=768)}, "--max-frames 768"),
        ({"video": msgspec.structs.replace(DEFAULTS.video, resize_pixels=0)},
         "--max-video-pixels 64000000"),
    ],
)  # fmt: skip
def test_figures_that_do_not_apply_are_named_and_refused(limits, flag: str) -> None:
    """`foveal plan` said that a resource fits which the operator, with a profile of that resource's
    own limits, refused with three problems."""
    result = plan(limited(gpu(), **limits), QWEN)
    assert not result.fits
    assert "ProfileLimits" in reasons(result)
    assert any(flag in problem.message for problem in result.problems)


def test_limits_of_a_modality_that_is_off_do_not_matter() -> None:
    off = msgspec.structs.replace(DEFAULTS.video, max_frames=768, max_per_prompt=0)
    assert plan(limited(gpu(), video=off), QWEN).fits


def test_ranks_hold_encoders_in_full() -> None:
    """4,031,488 bytes were measured on each of two ranks and 2,910,976 planned. The vocabulary has
    grown by ten words of 512 bytes since, of which each rank has half."""
    tiny = decode((PROFILES / "tiny-vlm.json").read_bytes())
    result = draft(gpu(num_devices=2), tiny)
    assert device(result, "weights") == 4_031_488 + 5 * 512
    # An encoder's activations are whole on every rank, too.
    one, two = draft(gpu(), QWEN), draft(gpu(num_devices=2), QWEN)
    assert device(one, "activations") == device(two, "activations")


@pytest.mark.parametrize(
    ("count", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)]
)
def test_a_number_of_devices_that_the_engine_refuses_is_refused(count: int, fits: bool) -> None:
    result = plan(gpu(num_devices=count), QWEN)
    assert ("DeviceCount" not in reasons(result)) is fits
    if not fits:
        assert "possible are 1, 2, 4" in result.problems[0].message


def test_what_sliding_windows_would_save_is_told() -> None:
    profile = msgspec.structs.replace(
        TEXT, max_model_len=131_072, window=1024, window_kv_bytes_per_token=24_576
    )
    (note,) = draft(gpu(), profile).notes
    assert "sliding window of 1024 tokens keep all tokens" in note
    assert "2.98 GiB of KV lie outside" in note
    assert draft(gpu(max_model_len=1024), profile).notes == ()


# --- suggestions -------------------------------------------------------------------------------
def test_a_7b_model_on_24_gib_gets_a_configuration_that_works_in_the_first_message() -> None:
    (problem,) = plan(gpu(24 * GIB), QWEN).problems
    assert problem.message.startswith(
        "The device has 24.00 GiB, of which 21.60 GiB is usable (10 % headroom). At least "
    )
    assert "Largest items: weights 15.45 GiB, kv 6.84 GiB (maxModelLen 128000)" in problem.message
    first = problem.edits[0]
    assert first.field == "engine.maxModelLen"
    assert plan(gpu(24 * GIB, max_model_len=int(first.after)), QWEN).fits


def test_several_edits_are_given_together_where_no_single_one_is_enough() -> None:
    (problem,) = plan(gpu(20 * GIB), QWEN).problems
    assert {edit.field for edit in problem.together} == {
        "engine.maxModelLen", "modalities.image.resizeToPixels", "modalities.video.maxFrames",
    }  # fmt: skip
    found = {edit.field: int(edit.after) for edit in problem.together}
    inputs = limited(
        gpu(20 * GIB, max_model_len=found["engine.maxModelLen"]),
        image=ModalityLimits(resize_pixels=found["modalities.image.resizeToPixels"]),
        video=msgspec.structs.replace(
            DEFAULTS.video, max_frames=found["modalities.video.maxFrames"]
        ),
    )
    assert plan(inputs, QWEN).fits
    assert "This configuration fits: set spec.engine.maxModelLen to" in problem.message


def test_more_devices_are_suggested_in_a_number_that_works() -> None:
    (problem,) = plan(gpu(10 * GIB), QWEN).problems
    assert "set spec.engine.accelerator.count to 4" in problem.message
    assert "count to 8" not in problem.message


def test_other_hardware_comes_last() -> None:
    edits = plan(gpu(24 * GIB), QWEN).problems[0].edits
    assert [edit.field for edit in edits] == ["engine.maxModelLen", "engine.accelerator.count"]


# --- devices of the nodes ----------------------------------------------------------------------
def test_a_device_that_no_node_has_is_refused() -> None:
    (problem,) = plan(gpu(80 * GIB, found_device_bytes=24 * GIB), VLM).problems
    assert problem.reason == "DeviceTooSmall"
    told = "80.00 GiB and devices that its pods may get have no more than 24.00 GiB"
    assert told in problem.message
    # A device that is sold as 80 GiB reports a little less.
    assert plan(gpu(80 * GIB, found_device_bytes=81_559 << 20), VLM).fits


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"quantization": "fp8, blocks of 128x128"}, "quantised weights (fp8, blocks of 128x128)"),
        ({"quantization": "int8, at load"}, "quantised weights (int8, at load)"),
        ({"state_bytes": 1 << 20}, "recurrent states"),
    ],
)
def test_what_no_ranks_share_is_refused_as_the_engine_does(change, what: str) -> None:
    inputs = gpu(num_devices=2)
    profile = msgspec.structs.replace(VLM, num_heads=8, num_kv_heads=8, **change)
    problem = next(one for one in plan(inputs, profile).problems if one.reason == "DeviceCount")
    assert f"{what} cannot be shared" in problem.detail
    assert problem.detail.startswith("engine.accelerator.count is 2 and")
    assert problem.detail.endswith("or more without quantisation") == ("at load" in what)
    assert problem.available == 1
    assert "DeviceCount" not in reasons(plan(gpu(num_devices=1), profile))
