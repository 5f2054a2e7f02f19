"""`foveal-runtime profile MODEL`: what a model costs, as JSON on standard output.

Joins the two packages that know: the model layer (weights, KV, activations) and the frontend's
processors (the largest items). Run by users, and by the operator as a Job.
"""

from __future__ import annotations

import argparse
import functools
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec

from foveal_runtime.main.revision import resolved_revision
from foveal_runtime.model.checkpoint.weights import check_directory
from foveal_runtime.model.cpu import threads
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits, Quantization
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile, ProcessMemory, ProfileLimits
from foveal_runtime.telemetry.deferred import defer

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
    assume_dtype: str = "",
    quantization: Quantization = "auto",
    max_num_batched_tokens: int = 2048,
) -> ModelProfile:
    """The profile of a checkpoint directory; with `measure` it is loaded and run on `device`.

    With `assume_dtype` the weights may be absent: their bytes then follow from config.json. Raises
    StartupError for a model that an engine would refuse, too.
    """
    defer()
    from foveal_runtime.frontend.media.largest import largest_items
    from foveal_runtime.model import profiler

    predict = functools.partial(
        profiler.predict, path, dtype, device=device, assume_dtype=assume_dtype,
        quantization=quantization,
    )  # fmt: skip
    predicted = predict()
    largest = {}
    if predicted.is_multimodal:
        largest = largest_items(path, limits, predicted.max_model_len)
        items = {name: one.profile for name, one in largest.items()}
        predicted = predict(items=items)
    predicted = msgspec.structs.replace(
        predicted,
        revision=resolved_revision(Path(path)),
        limits=ProfileLimits.of(limits),
        processor={key: value for one in largest.values() for key, value in one.options.items()},
        versions={**predicted.versions, "foveal-runtime": version("foveal-runtime")},
    )
    if not measure:
        return predicted
    return profiler.measure(
        predicted,
        path,
        dtype=dtype,
        device=device,
        quantization=quantization,
        max_num_batched_tokens=max_num_batched_tokens,
        values={name: one.value for name, one in largest.items()},
    )


def limits_of(arguments: argparse.Namespace) -> ModalitiesConfig:
    """The limits on media that the flags name."""
    image = ModalityLimits(
        max_pixels=arguments.max_pixels, resize_pixels=arguments.resize_to_pixels
    )
    video = ModalityLimits(
        max_pixels=arguments.max_video_pixels or arguments.max_pixels,
        resize_pixels=arguments.resize_video_to_pixels,
        max_frames=arguments.max_frames,
        max_seconds=arguments.max_seconds,
    )
    audio = ModalityLimits(max_seconds=arguments.max_audio_seconds or arguments.max_seconds)
    return ModalitiesConfig(image=image, video=video, audio=audio)


def run(arguments: argparse.Namespace) -> int:
    # At once: what comes next imports for seconds.
    check_directory(arguments.model)
    if arguments.output:
        _write(arguments.output, "ab", b"")
    threads.configure()
    limits = limits_of(arguments)
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
        assume_dtype=arguments.assume_dtype,
        quantization=arguments.quantization,
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
        _write(arguments.output, "wb", compact(found))
    else:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    return 0


def _write(path: str, mode: str, data: bytes) -> None:
    try:
        with Path(path).open(mode) as file:
            file.write(data)
    except OSError as error:
        raise StartupError(f"--output {path}: {error.strerror}") from error


def engine_bytes_of(profile: ModelProfile, device: str) -> int:
    """See ProcessMemory; 0 for a device whose driver's part is not to be seen here."""
    from foveal_runtime.main.footprint import measure_engine

    if device != "cpu" or profile.source == "measured":  # then weights are in this process
        return 0
    return measure_engine(profile.dtype, min(MAX_KERNEL_WIDTH, profile.embed_width or 1024))


def compact(profile: ModelProfile) -> bytes:
    """The document on one line, so small that a termination message holds it: what budgets do not
    need is left out when it must be. Raises StartupError when even that does not fit."""
    replace = msgspec.structs.replace
    small = replace(profile, kv_bytes_per_layer=())
    items = {name: replace(item, smaller=()) for name, item in profile.items.items()}
    for one in (
        profile, small, replace(small, sources={}), replace(small, sources={}, items=items)
    ):  # fmt: skip
        data = msgspec.json.encode(one)
        if len(data) <= MAX_TERMINATION_MESSAGE_BYTES:
            return data
    raise StartupError(
        f"the profile has {len(data)} bytes, more than a termination message's "
        f"{MAX_TERMINATION_MESSAGE_BYTES}: shorten the model's folder name"
    )
