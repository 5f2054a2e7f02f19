"""`foveal-runtime profile MODEL`: what a model costs, as JSON on standard output.

Joins the two packages that know: the model layer (weights, KV, activations) and the frontend's
processors (the largest items). Run by users, and by the operator as a Job.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from foveal_runtime.main.revision import resolved_revision
from foveal_runtime.model.cpu import threads
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile, ProcessMemory

MAX_TERMINATION_MESSAGE_BYTES = 4096
"""Kubernetes' own limit; what is longer is cut off."""
MAX_KERNEL_WIDTH = 1024


def profile_model(
    path: str,
    limits: ModalitiesConfig,
    *,
    measure: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
    max_num_batched_tokens: int = 2048,
) -> ModelProfile:
    """The profile of a checkpoint directory; with `measure` it is loaded and run on `device`.

    Raises StartupError for a model that an engine would refuse, too.
    """
    from foveal_runtime.frontend.media.largest import largest_items
    from foveal_runtime.model import profiler

    predicted = profiler.predict(path, dtype, device=device)
    largest = {}
    if predicted.is_multimodal:
        largest = largest_items(path, limits, predicted.max_model_len)
        items = {name: one.profile for name, one in largest.items()}
        predicted = profiler.predict(path, dtype, items, device)
    predicted = msgspec.structs.replace(predicted, revision=resolved_revision(Path(path)))
    if not measure:
        return predicted
    return profiler.measure(
        predicted,
        path,
        dtype=dtype,
        device=device,
        max_num_batched_tokens=max_num_batched_tokens,
        values={name: one.value for name, one in largest.items()},
    )


def run(arguments: argparse.Namespace) -> int:
    threads.configure()
    image = ModalityLimits(max_pixels=arguments.max_pixels)
    video = ModalityLimits(
        max_pixels=arguments.max_video_pixels or arguments.max_pixels,
        max_frames=arguments.max_frames,
        max_seconds=arguments.max_seconds,
    )
    audio = ModalityLimits(max_seconds=arguments.max_audio_seconds or arguments.max_seconds)
    limits = ModalitiesConfig(image=image, video=video, audio=audio)
    processes = ProcessMemory()
    if arguments.processes:  # first: this process is small as yet
        from foveal_runtime.main.footprint import measure_frontend

        processes = measure_frontend(arguments.model, limits)
    found = profile_model(
        arguments.model,
        limits,
        measure=arguments.measure,
        dtype=arguments.dtype,
        device=arguments.device,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
    )
    if arguments.processes:
        found = msgspec.structs.replace(
            found,
            processes=msgspec.structs.replace(
                processes, engine_bytes=engine_bytes_of(found, arguments.device)
            ),
        )
    if arguments.output:
        # In a pod: the termination message, which the operator reads without any right to the pod.
        Path(arguments.output).write_bytes(compact(found))
    else:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    return 0


def engine_bytes_of(profile: ModelProfile, device: str) -> int:
    """See ProcessMemory; 0 for a device whose driver's part is not to be seen here."""
    from foveal_runtime.main.footprint import measure_engine

    if device != "cpu" or profile.source == "measured":  # then weights are in this process
        return 0
    return measure_engine(profile.dtype, min(MAX_KERNEL_WIDTH, profile.embed_width or 1024))


def compact(profile: ModelProfile) -> bytes:
    """The document on one line, so small that a termination message holds it: what budgets do not
    need is left out when it must be. Raises StartupError when even that does not fit."""
    small = msgspec.structs.replace(profile, kv_bytes_per_layer=())
    for one in (profile, small, msgspec.structs.replace(small, sources={})):
        data = msgspec.json.encode(one)
        if len(data) <= MAX_TERMINATION_MESSAGE_BYTES:
            return data
    raise StartupError(
        f"the profile has {len(data)} bytes, more than a termination message's "
        f"{MAX_TERMINATION_MESSAGE_BYTES}: shorten the model's folder name"
    )
