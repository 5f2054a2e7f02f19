"""The sizes of `foveal serve`: device found, memory measured, budgets by the operator's planner."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from foveal_runtime.main.fetch import cache_folder
from foveal_runtime.plan.budget.types import (
    BudgetInputs,
    BudgetPlan,
    Edit,
    EngineInputs,
    FrontendInputs,
    Problem,
)
from foveal_runtime.plan.config import GIB, ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.machine import Machine, visible_devices
from foveal_runtime.plan.machine_plan import machine_plan, shortfall
from foveal_runtime.plan.profile import ModelProfile, decode
from foveal_runtime.plan.quantity import format_gib

Part = TypeVar("Part", bound=msgspec.Struct)
FLAGS = {
    "caches.kv.size": "--kv-cache",
    "caches.ipc.size": "--ipc-cache",
    "caches.processor.size": "--processor-cache",
    "caches.encoder.tokens": "--encoder-cache-embeds",
    "caches.encoder.hostSize": "--encoder-host-tier",
    "caches.headroomPercent": "--memory",
    "engine.maxModelLen": "--max-model-len",
    "engine.maxNumBatchedTokens": "--max-num-batched-tokens",
    "engine.accelerator.count": "--tensor-parallel",
    "frontend.processes": "--processes",
    "frontend.mediaWorkers": "--media-workers",
}
"""Fields of the resource, by which the planner names its suggestions, and our options."""


_TOO_LITTLE = {
    "FrontendMemory": "A frontend", "EngineMemory": "An engine", "DeviceMemory": "A device",
}  # fmt: skip
"""Reasons of the planner's, and what has too little memory."""
_PINNED = {
    "kv": ("kv_bytes", "--kv-cache"), "ipc": ("ipc_bytes", "--ipc-cache"),
    "processor": ("processor_bytes", "--processor-cache"),
}  # fmt: skip


class Misfit(StartupError):
    """The budgets do not fit this machine."""

    exit_code = 3


def choose_device(asked: str, here: Machine, needed: int) -> str:
    """ "cpu" or "cuda". Raises StartupError for a GPU that is not there or cannot be used."""
    if asked == "cpu":
        return "cpu"
    has_cuda = not _torch_version().endswith("+cpu")
    if not here.devices:
        names = visible_devices()
        if here.num_listed and (asked == "cuda" or (has_cuda and names != [])):
            raise StartupError(
                f"{_visible()} no device whose memory nvidia-smi tells (parts of one, MIG, are not "
                "supported): give numbers or UUIDs of whole devices, or use --device cpu"
            )
        if asked == "auto":
            return "cpu"
        raise StartupError(
            "--device cuda: no NVIDIA driver answers here (nvidia-smi lists no device): install "
            "the driver, give the container its devices, or use --device cpu"
        )
    if not has_cuda:
        if asked == "auto":
            return "cpu"
        raise StartupError(
            f"--device cuda: torch {_torch_version()} is a build for CPUs: install one with CUDA, "
            "or use --device cpu"
        )
    if needed > len(here.devices):
        raise StartupError(
            f"{needed} devices are asked for (--engines x --tensor-parallel) and this machine has "
            f"{len(here.devices)}: lower one of them, or use --device cpu"
        )
    return "cuda"


def _visible() -> str:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "this machine has" if value is None else f"CUDA_VISIBLE_DEVICES={value} names"


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError as error:
        raise StartupError(
            "torch is not installed here; pip install 'foveal-runtime[frontend,engine]'"
        ) from error


def find_profile(arguments: argparse.Namespace, path: Path, device: str) -> ModelProfile:
    """The model's costs: from a file, from an earlier start, or by `foveal-runtime profile`.
    Raises StartupError."""
    if arguments.profile:
        try:
            given = decode(Path(arguments.profile).read_bytes())
        except OSError as error:
            raise StartupError(f"--profile {arguments.profile}: {error.strerror}") from error
        kind = given.quantization.removesuffix(", at load")
        made = "auto" if kind == given.quantization else kind
        if made != arguments.quantization:
            raise StartupError(
                f"--profile {arguments.profile}: was made with --quantization {made}, and "
                f"{arguments.quantization} is asked for: give both the same"
            )
        return given
    kept = cache_folder("profiles") / f"{_key(arguments, path, device)}.json"
    if kept.is_file():
        try:
            return decode(kept.read_bytes())
        except (OSError, StartupError):
            pass  # of another version, or cut off: made again
    print("reading the model's costs (once for each model)", flush=True)
    with tempfile.TemporaryDirectory(prefix="foveal-profile-") as folder:
        file = Path(folder) / "profile.json"
        command = [sys.executable, "-m", "foveal_runtime.main.cli", "profile", str(path),
                   "--no-processes", "--dtype", arguments.dtype, "--device", device,
                   "--quantization", arguments.quantization,
                   "--max-num-batched-tokens", str(arguments.max_num_batched_tokens),
                   "--output", str(file)]  # fmt: skip
        done = subprocess.run(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"profile ended with {done.returncode}"]
            raise StartupError(re.sub(r"^foveal(-runtime)?: ", "", lines[-1]))
        data = file.read_bytes()
    found = decode(data)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(data)
        partial.rename(kept)
    except OSError:
        pass  # a cache: the next start reads the model again
    return found


def installed_versions() -> dict[str, str]:
    """Of the packages that a profile names."""
    return {name: version(name) for name in ("foveal-runtime", "transformers", "torch")}


def _key(arguments: argparse.Namespace, path: Path, device: str) -> str:
    """Of the model's files and of all that computes with them."""
    found = hashlib.blake2b(digest_size=16)
    for file in sorted(path.iterdir()):
        if file.is_file():
            status = file.stat()
            found.update(f"{file} {status.st_size} {status.st_mtime_ns}\n".encode())
    versions = list(installed_versions().values())
    found.update(
        repr(
            (
                versions,
                arguments.dtype,
                arguments.quantization,
                device,
                arguments.max_num_batched_tokens,
            )
        ).encode()
    )
    return found.hexdigest()


def size_up(
    arguments: argparse.Namespace, profile: ModelProfile, device: str, here: Machine
) -> BudgetPlan:
    """The plan for this machine. Raises Misfit, in one line with remedies."""
    host_bytes = here.usable_bytes
    inputs = budget_inputs(arguments, device, here)
    counts = arguments.num_frontends, arguments.num_engines
    found = machine_plan(inputs, profile, host_bytes, *counts)
    if found.problems:
        first = found.problems[0]
        hints = " or ".join(
            f"{FLAGS[edit.field]} {_value(edit.field, edit.after)}"
            for edit in first.edits
            if edit.field in FLAGS and edit.after != "Auto" and _is_possible(edit, here)
        )
        hints = _smaller(first, arguments) or hints or "a smaller model, or --dtype bfloat16"
        raise Misfit(f"{_in_our_words(first, found, arguments.memory)}. Options: {hints}")
    if short := shortfall(found, host_bytes, *counts):
        raise Misfit(f"{short}. Options: end other programs, lower --engines, or a smaller model")
    return found


def _in_our_words(problem: Problem, found: BudgetPlan, memory: float) -> str:
    """The planner speaks of pods and of the resource's fields."""
    if problem.reason not in _TOO_LITTLE:
        detail = problem.detail
        for field, flag in FLAGS.items():
            detail = detail.replace(field, flag)
        return detail
    lines = next(one.lines for one in found.places if one.place == problem.place)
    largest = ", ".join(
        f"{line.name} {format_gib(line.bytes)}"
        for line in sorted(lines, key=lambda line: -line.bytes)[:3]
    )
    short = format_gib(problem.needed - problem.available)
    return (
        f"{_TOO_LITTLE[problem.reason]} needs at least {format_gib(problem.needed)} and may use "
        f"{format_gib(problem.available)} (--memory {memory:g}): {short} too little. Largest "
        f"items: {largest}"
    )


def _smaller(problem: Problem, arguments: argparse.Namespace) -> str:
    """The size that the user gave and that leaves too little; "" where it is not that."""
    is_short = problem.reason in _TOO_LITTLE
    name, flag = _PINNED.get(problem.term, ("", "")) if is_short else ("", "")
    given = (getattr(arguments, name) or 0) if name else 0
    return f"a smaller {flag}" if given > problem.needed - problem.available else ""


def _is_possible(edit: Edit, here: Machine) -> bool:
    """The planner knows the size of a device, not how many this machine has."""
    return FLAGS[edit.field] != "--tensor-parallel" or int(edit.after) <= len(here.devices)


def _value(field: str, after: str) -> str:
    return f"{1 - int(after) / 100:g}" if field == "caches.headroomPercent" else after


def describe(here: Machine, device: str) -> str:
    """The machine in one line."""
    cgroup = f" (cgroup limit {format_gib(here.cgroup_bytes)})" if here.cgroup_bytes else ""
    devices = ""
    if device == "cuda":
        devices = f", {len(here.devices)} GPU(s) of {format_gib(min(here.devices))}"
    return (
        f"{here.cpus:g} CPUs, {format_gib(here.usable_bytes)} of memory available{cgroup}{devices}"
    )


def modalities_for(document_pages: int) -> ModalitiesConfig:
    """The limits on media: a document's pages are images of the prompt."""
    images = max(document_pages, ModalityLimits().max_per_prompt)
    return ModalitiesConfig(image=ModalityLimits(max_per_prompt=images, max_pages=document_pages))


def part_of(kind: type[Part], options: Mapping[str, Any], **own: Any) -> Part:
    """A document or a part of one: the options of the same names, and what is its `own`."""
    shared = options.keys() & set(kind.__struct_fields__)
    return kind(**{name: options[name] for name in shared} | own)


def shared_value_bytes(arguments: argparse.Namespace) -> int:
    """/dev/shm for values of all frontends together: no share of an engine's memory."""
    if arguments.ipc_type != "shm":
        return 0
    if arguments.shm_bytes:
        return int(arguments.shm_bytes)
    return GIB if arguments.ipc_bytes is None else int(arguments.ipc_bytes)


def budget_inputs(arguments: argparse.Namespace, device: str, here: Machine) -> BudgetInputs:
    """The planner's view of the options."""
    a = arguments
    is_gpu = device == "cuda"
    return BudgetInputs(
        frontend=FrontendInputs(
            processes=a.processes,
            media_workers=a.media_workers or max(1, min(8, int(here.cpus) - 1)),
            processor_bytes=a.processor_bytes,
            shm_bytes=shared_value_bytes(a) // a.num_frontends,
        ),
        engine=part_of(
            EngineInputs,
            vars(a),
            device="gpu" if is_gpu else "cpu",
            num_devices=a.tensor_parallel,
            device_bytes=min(here.devices) if is_gpu else 0,
            generates=a.task != "embed",
        ),
        modalities=modalities_for(a.max_document_pages),
        headroom_percent=round(100 * (1 - a.memory)),
    )
