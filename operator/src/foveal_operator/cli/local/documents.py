"""The pods' start-up documents, made to fit processes of one machine. Pure.

Called by `foveal up` with the objects that the operator would apply: their ConfigMaps are read as
a pod reads them, and only what a pod has and a process has not is replaced: addresses, mounted
paths, the number of CPUs. Every budget, limit and switch stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TypeVar

import msgspec

from foveal_operator.manifests import Desired
from foveal_operator.manifests.documents import CURVE_DIRECTORY, SHARED_DIRECTORY, WARM_DIRECTORY
from foveal_runtime.plan.config import (
    CurveKeys,
    EngineConfig,
    FrontendConfig,
    InjectionConfig,
    MediaSources,
    expand,
)
from foveal_runtime.plan.local import LOOPBACK, connect
from foveal_runtime.plan.lora import LoraSource

T = TypeVar("T", EngineConfig, FrontendConfig)
_KEY_FILES = {
    "api_key_file": "--api-key-file",
    "admin_key_file": "--admin-key-file",
    "injection": "--injection-key-file",
}


class LocalPlace(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in for a pod's surroundings.

    Attributes:
        model_path: directory of the model.
        folder: for CURVE keys and warm sets.
        host, port: of the first frontend; the next ones follow it. 0 = any free ports.
        shm_directory: stands for the volume that frontends and engines of a node share.
        num_cpus: no engine computes with more threads.
        key_files: by option, files that stand for the resource's Secrets.
        file_root: folder that stands for the claim with local files; "" = none.
    """

    model_path: str
    folder: str
    host: str = LOOPBACK
    port: int = 0
    shm_directory: str = "/dev/shm"
    num_cpus: int = 1
    key_files: dict[str, str] = {}
    file_root: str = ""


class LocalDocuments(msgspec.Struct, frozen=True, kw_only=True):
    """One document for each process; `notes` say in what they differ from pods for a reason that
    a user may care about."""

    engines: tuple[EngineConfig, ...]
    frontends: tuple[FrontendConfig, ...]
    notes: tuple[str, ...]


def adapted_documents(
    wanted: Desired, place: LocalPlace, pick_port: Callable[[], int]
) -> LocalDocuments:
    """From the operator's objects to documents that run here. `wanted` must be complete."""
    workload, deployment = wanted.of_kind("StatefulSet")[0], wanted.of_kind("Deployment")[0]
    name = deployment["metadata"]["name"].removesuffix("-frontend")
    engines = [
        _engine(_pod(wanted, "engine", f"{name}-engine-{i}", EngineConfig), place)
        for i in range(workload["spec"].get("replicas", 1))
    ]
    pods = [
        _pod(wanted, "frontend", f"{name}-frontend-{i}", FrontendConfig)
        for i in range(deployment["spec"].get("replicas", 1))
    ]
    frontends = [_frontend(pod, place) for pod in pods]
    placed = connect(engines, frontends, place.host, place.port, pick_port)
    notes = tuple(dict.fromkeys(note for pod in pods for note in _notes(pod, place)))
    return LocalDocuments(engines=placed[0], frontends=placed[1], notes=notes)


def _pod(wanted: Desired, role: str, pod: str, config: type[T]) -> T:
    """The document as a pod of this name reads it."""
    found = [
        body["data"][f"{role}.json"]
        for body in wanted.of_kind("ConfigMap")
        if f"{role}.json" in body.get("data", {})
    ]
    environment = {"POD_NAME": pod, "POD_IP": LOOPBACK, "NODE_NAME": "local"}
    return msgspec.json.decode(expand(found[0], environment), type=config)


def _engine(pod: EngineConfig, place: LocalPlace) -> EngineConfig:
    warm = pod.caches.warm_directory.replace(WARM_DIRECTORY, f"{place.folder}/warm", 1)
    return msgspec.structs.replace(
        pod,
        model=msgspec.structs.replace(pod.model, path=place.model_path),
        loras=tuple(
            _lora(one, pod.model.path, PurePosixPath(place.model_path)) for one in pod.loras
        ),
        caches=msgspec.structs.replace(pod.caches, warm_directory=warm),
        curve=_curve(pod.curve, place),
        shm_directory=pod.shm_directory.replace(SHARED_DIRECTORY, place.shm_directory, 1),
        num_threads=min(pod.num_threads, place.num_cpus),
        log_format="text",
    )


def _lora(pod: LoraSource, model: str, here: PurePosixPath) -> LoraSource:
    """A path below the model's is below where the model is here."""
    path = PurePosixPath(pod.path)
    if not path.is_relative_to(model):
        return pod
    return LoraSource(pod.name, str(here / path.relative_to(model)))


def _frontend(pod: FrontendConfig, place: LocalPlace) -> FrontendConfig:
    return msgspec.structs.replace(
        pod,
        model=msgspec.structs.replace(pod.model, path=place.model_path),
        curve=_curve(pod.curve, place),
        shm_directory=pod.shm_directory.replace(SHARED_DIRECTORY, place.shm_directory, 1),
        media_sources=_sources(pod, place),
        api_key_file=_key_file(pod, "api_key_file", place),
        admin_key_file=_key_file(pod, "admin_key_file", place),
        injection=_injection(pod, place),
        log_format="text",
    )


def _curve(keys: CurveKeys, place: LocalPlace) -> CurveKeys:
    """The same encryption as between pods, with keys of this deployment's own."""
    folder = f"{place.folder}/curve"
    changed = {
        name: getattr(keys, name).replace(CURVE_DIRECTORY, folder, 1)
        for name in keys.__struct_fields__
    }
    return CurveKeys(**changed)


def _key_file(pod: FrontendConfig, field: str, place: LocalPlace) -> str:
    return place.key_files.get(_KEY_FILES[field], "") if getattr(pod, field) else ""


def _sources(pod: FrontendConfig, place: LocalPlace) -> MediaSources:
    root = place.file_root if pod.media_sources.file_root else ""
    return msgspec.structs.replace(pod.media_sources, file_root=root)


def _injection(pod: FrontendConfig, place: LocalPlace) -> InjectionConfig:
    given = place.key_files.get(_KEY_FILES["injection"], "")
    if not pod.injection.enabled or not given:
        return InjectionConfig()
    return msgspec.structs.replace(pod.injection, api_key_file=given)


def _notes(pod: FrontendConfig, place: LocalPlace) -> Iterator[str]:
    """Secrets are a cluster's: what happens without them is said, never silent."""
    without = {
        "api_key_file": "requests need no API key here",
        "admin_key_file": "cache administration is off here",
        "injection": "injected media is off here",
    }
    asked = {
        "api_key_file": bool(pod.api_key_file),
        "admin_key_file": bool(pod.admin_key_file),
        "injection": pod.injection.enabled,
    }
    for field, option in _KEY_FILES.items():
        if asked[field] and not place.key_files.get(option):
            yield f"the resource takes keys from a Secret; without {option} {without[field]}"
    if pod.media_sources.file_root and not place.file_root:
        yield "the resource takes local files from a claim; without --file-root file: URLs are off"
