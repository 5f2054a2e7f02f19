"""The profile Job has memory for the largest item that the resource's limits allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal_operator.api import reasons
from foveal_operator.api.parse import parse
from foveal_operator.manifests import ClusterFacts, desired
from foveal_runtime.plan.config import GIB, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.profile import profile_memory_bytes
from tests.support.samples import resource
from tests.support.stored_objects import StoredObjects


def memory(**modalities: Any) -> dict[str, str]:
    """Request and limit of the profile Job's container."""
    inference = parse(resource(modalities=modalities))
    job = desired(inference, None, ClusterFacts()).of_kind("Job")[-1]
    found = job["spec"]["template"]["spec"]["containers"][0]["resources"]
    return {kind: found[kind]["memory"] for kind in ("requests", "limits")}


@pytest.mark.parametrize(
    ("modalities", "requested", "limit"),
    [
        # 2 GiB + 96 bytes x 64 megapixels = 7.72 GiB
        ({}, "4Gi", "8Gi"),
        # 2 GiB + 96 bytes x 8 frames x 4 megapixels = 4.86 GiB: more frames change nothing
        ({"image": {"maxPixels": 1_000_000}}, "4Gi", "5Gi"),
        ({"image": {"maxPixels": 1_000_000}, "video": {"maxFrames": 65536}}, "4Gi", "5Gi"),
        # 2 GiB + 600 s x 1 MiB = 2.59 GiB
        ({"image": {"maxPixels": 1024}, "video": {"maxFrames": 1, "maxPixels": 1024}},
         "3Gi", "3Gi"),
        # an hour of sound
        ({"image": {"maxPixels": 1024}, "video": {"maxFrames": 1}, "audio": {"maxSeconds": 3600}},
         "4Gi", "6Gi"),
        # 2 GiB + 96 bytes x 1,000 megapixels
        ({"image": {"maxPixels": 1_000_000_000}}, "4Gi", "92Gi"),
    ],
)  # fmt: skip
def test_worked_examples(modalities: Any, requested: str, limit: str) -> None:
    assert memory(**modalities) == {"requests": requested, "limits": limit}


LIMITS = st.builds(
    lambda pixels, frame, frames, seconds: ModalitiesConfig(
        image=ModalityLimits(max_pixels=pixels),
        video=ModalityLimits(max_pixels=frame, max_frames=frames),
        audio=ModalityLimits(max_seconds=seconds),
    ),
    st.integers(1024, 10**9), st.integers(1024, 10**9), st.integers(1, 65536),
    st.integers(1, 86400),
)  # fmt: skip


@given(LIMITS, LIMITS)
def test_higher_limits_never_mean_less_memory(
    one: ModalitiesConfig, other: ModalitiesConfig
) -> None:
    both = ModalitiesConfig(
        image=ModalityLimits(max_pixels=max(one.image.max_pixels, other.image.max_pixels)),
        video=ModalityLimits(
            max_pixels=max(one.video.max_pixels, other.video.max_pixels),
            max_frames=max(one.video.max_frames, other.video.max_frames),
        ),
        audio=ModalityLimits(max_seconds=max(one.audio.max_seconds, other.audio.max_seconds)),
    )
    found = profile_memory_bytes(both)
    assert found >= max(profile_memory_bytes(one), profile_memory_bytes(other)) >= 2 * GIB
    assert found % GIB == 0


def test_a_job_that_was_killed_for_memory_says_what_to_lower() -> None:
    stored = (
        StoredObjects(parse(resource(model={"uri": "pvc://weights/qwen"}))).claim().job("profile")
    )
    state = {"exitCode": 137, "reason": "OOMKilled", "message": "", "finishedAt": "2026-01-01"}
    found = stored.pod("profile", {"terminated": state}).decide()
    assert found.reason is reasons.PROFILE_FAILED
    assert "its limit of 8Gi follows from modalities.image.maxPixels" in found.message
    found = stored.job("profile", "Failed", ago=1).decide()
    assert found.reason is reasons.PROFILE_FAILED
    assert "lower the largest of them" in found.message
