"""`foveal serve MODEL`: a model's name to a deployment of this machine, in one command.

Checks what can be checked without loading anything, finds the model, plans its memory as the
operator does, writes the documents that the operator writes from a resource, and runs them as
`launch` does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from foveal_runtime.frontend.http.access.auth import KeyFile
from foveal_runtime.main.launcher import check_port
from foveal_runtime.main.local.launch import launch
from foveal_runtime.main.local.model import Found, find_model
from foveal_runtime.main.local.options import printed
from foveal_runtime.main.local.sizing import (
    choose_device,
    describe,
    find_profile,
    installed_versions,
    modalities_for,
    part_of,
    shared_value_bytes,
    size_up,
)
from foveal_runtime.plan import machine
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.config import (
    DEFAULT_DOCUMENT_PAGES,
    MIB,
    EngineCaches,
    EngineConfig,
    FrontendConfig,
    InjectionConfig,
    ItemSize,
    MediaSources,
    ModalitiesConfig,
    ModelConfig,
    RequestDefaults,
    SchedulerConfig,
    read_text,
)
from foveal_runtime.plan.embedder import check_task
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LOOPBACK, LocalDeploymentConfig, connect, free_port
from foveal_runtime.plan.lora import (
    LORA_WEIGHTS,
    LoraSource,
    check_lora_names,
    lora_sources,
    read_adapter_config,
)
from foveal_runtime.plan.machine_plan import plan_lines
from foveal_runtime.plan.profile import ModelProfile, ProfileLimits

_PACKAGES = ("torch", "transformers", "fastapi", "uvicorn", "zmq", "PIL", "safetensors")
_KEY_FILES = ("api_key_file", "admin_key_file", "injection_key_file")
_FILES = (*_KEY_FILES, "profile", "chat_template")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises StartupError."""
    if arguments.print_config:
        sys.stdout.write(printed(arguments))
        return 0
    _check_options(arguments)
    arguments.chat_template = _chat_template(arguments.chat_template)
    arguments.request_defaults = _request_defaults(arguments.request_defaults)
    here = machine.look()
    needed = arguments.num_engines * arguments.tensor_parallel
    arguments.device = choose_device(arguments.device, here, needed)
    if not arguments.plan:  # before anything is downloaded
        for number in range(arguments.num_frontends if arguments.port else 0):
            check_port(arguments.host, arguments.port + number)
    sources = lora_sources(arguments.loras)
    for one in sources:
        read_adapter_config(one)
    found = find_model(arguments.model, arguments.revision, arguments.task)
    check_task(found.path, arguments.task, arguments.model)
    profile = find_profile(arguments, found.path, arguments.device)
    check_lora_names([one.name for one in sources], arguments.name or found.name)
    if arguments.lora_bytes is None:
        arguments.lora_bytes = sum(adapter_bytes(one, profile.dtype) for one in sources)
    plan = size_up(arguments, profile, arguments.device, here)
    print(f"{found.name} on {arguments.device}: {describe(here, arguments.device)}")
    for line in plan_lines(plan, arguments.num_frontends, arguments.num_engines):
        print(line)
    sys.stdout.flush()
    if arguments.plan:
        return 0
    items = {} if arguments.profile else known_items(profile, plan.max_model_len)
    return launch(_config(_planned(arguments, found, plan), arguments, items))


def adapter_bytes(source: LoraSource, dtype: str) -> int:
    """What an adapter takes once loaded. Raises StartupError."""
    from foveal_runtime.model.checkpoint.weights import file_header

    header = file_header(Path(source.path) / LORA_WEIGHTS)
    numbers = sum(math.prod(one.shape) for one in header.values())
    return numbers * {"float32": 4}.get(dtype, 2)


def _check_options(arguments: argparse.Namespace) -> None:
    if not arguments.model:
        raise StartupError(
            "MODEL is missing: give a directory, or ORG/NAME of the Hugging Face hub"
        )
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise StartupError(
            f"packages are missing ({', '.join(missing)}): pip install "
            "'foveal-runtime[frontend,engine]'"
        )
    for field in _FILES:
        path = getattr(arguments, field)
        if path and not Path(path).is_file():
            option = f"--{field.replace('_', '-')}"
            raise StartupError(f"{option} {path}: there is no such file")
        if path and field in _KEY_FILES:
            KeyFile(path)
    if arguments.file_root and not Path(arguments.file_root).is_dir():
        raise StartupError(f"--file-root {arguments.file_root}: there is no such directory")
    if arguments.tensor_parallel > 1:
        quantised = arguments.quantization != "auto"
        for option, is_given in (("--quantization", quantised), ("--lora", arguments.loras)):
            if is_given:
                raise StartupError(
                    f"{option} runs on one device: leave it out, or set --tensor-parallel 1"
                )
    last = arguments.port + arguments.num_frontends - 1
    if arguments.port and last > 65535:
        raise StartupError(f"--port {arguments.port}: the last frontend's would be {last}")
    events = arguments.events_port
    last_events = events + 2 * arguments.num_engines - 1  # a stream and its replays each
    if events and last_events > 65535:
        raise StartupError(f"--events-port {events}: the last engine's would be {last_events}")
    if events and arguments.port and events <= last and arguments.port <= last_events:
        raise StartupError(
            f"--events-port {events}: engines take {events} to {last_events}, frontends "
            f"{arguments.port} to {last}; choose ports that do not meet"
        )


def _chat_template(file: str) -> str:
    if not file:
        return ""
    text = read_text(file, f"--chat-template {file}")
    if not text.strip():
        raise StartupError(f"--chat-template {file}: it is empty")
    return text


def _request_defaults(texts: Sequence[str]) -> RequestDefaults:
    """Of NAME=VALUE each, the value as JSON."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise StartupError(f"--request-default {text}: write NAME=VALUE")
        if name not in RequestDefaults.__struct_fields__:
            names = ", ".join(RequestDefaults.__struct_fields__)
            raise StartupError(f"--request-default {text}: {name} is not one of {names}")
        try:
            found[name] = msgspec.json.decode(value)
            msgspec.convert(found, RequestDefaults)
        except (msgspec.DecodeError, RecursionError) as error:
            what = str(error).partition(" - at ")[0].replace("`", "")
            raise StartupError(f"--request-default {text}: {what}") from error
    return msgspec.convert(found, RequestDefaults)


def _planned(arguments: argparse.Namespace, found: Found, plan: BudgetPlan) -> dict[str, Any]:
    """The options of `local_documents`, every size as it was planned."""
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name in _OPTIONS and value is not None
    }
    return given | {
        "model": str(found.path),
        "name": arguments.name or found.name,
        "max_model_len": plan.max_model_len,
        "max_num_encoder_input_tokens": plan.encoder_compute_embeds,
        "kv_bytes": plan.kv_bytes,
        "snapshot_bytes": plan.snapshot_bytes,
        "ipc_bytes": plan.ipc_bytes,
        "ipc_staging_bytes": plan.ipc_staging_bytes,
        "processor_bytes": plan.processor_bytes,
        "encoder_embeds": plan.encoder_embeds,
        "encoder_host_bytes": plan.encoder_host_bytes,
        "shm_bytes": shared_value_bytes(arguments),
    }


def known_items(profile: ModelProfile, max_model_len: int) -> dict[str, ItemSize]:
    """The profile's largest items, as an engine without limits of its own on media would find them;
    none where it would find others: under other limits, with packages of other versions, or in a
    shorter context."""
    if profile.limits != ProfileLimits.of(ModalitiesConfig()):
        return {}
    if profile.versions != installed_versions():
        return {}
    if any(item.num_tokens > max_model_len for item in profile.items.values()):
        return {}
    return {
        name: ItemSize(
            num_tokens=item.num_tokens,
            num_embeds=item.num_embeds,
            processed_bytes=item.processed_bytes,
        )
        for name, item in profile.items.items()
    }


def _config(
    options: dict[str, Any], arguments: argparse.Namespace, items: dict[str, ItemSize]
) -> LocalDeploymentConfig:
    engines, frontends = local_documents(free_port, **options)
    engines = [msgspec.structs.replace(engine, items=items) for engine in engines]
    first = engines[0]
    return LocalDeploymentConfig(
        name=frontends[0].model.served_name,
        engines=tuple(engines),
        frontends=tuple(frontends),
        devices_per_engine=first.tensor_parallel if first.device == "cuda" else 0,
        start_timeout_seconds=arguments.start_timeout_seconds,
        drain_timeout_seconds=arguments.drain_timeout_seconds + 15.0,
        view="line",
    )


_DOCUMENTS: tuple[type[msgspec.Struct], ...] = (
    ModelConfig, SchedulerConfig, EngineCaches, EngineConfig, MediaSources, FrontendConfig
)  # fmt: skip
_FIELDS = frozenset(name for kind in _DOCUMENTS for name in kind.__struct_fields__)
_DEFAULTS = {"snapshot_bytes": 256 * MIB, "events_format": "vllm", "kv_touched": False}
"""Where they are not the documents' own. KV memory is taken as it fills: nothing limits it here,
and other programs want memory, too."""


def local_documents(
    pick_port: Callable[[], int],
    *,
    model: str,
    num_engines: int = 1,
    num_frontends: int = 1,
    loras: Sequence[str] = (),
    max_document_pages: int = DEFAULT_DOCUMENT_PAGES,
    shm_bytes: int = 0,
    warm_directory: str = "",
    injection_key_file: str = "",
    injection_trusted: bool = False,
    events_port: int = 0,
    **fields: Any,
) -> tuple[list[EngineConfig], list[FrontendConfig]]:
    """Documents for `num_engines` engines and `num_frontends` frontends on loopback.

    The first frontend listens on `port`, the next ones on the ports after it (0: any free ports);
    its /metrics shows every other process too.

    Args:
        shm_bytes: all frontends' together; 0 = as much as one engine's value cache holds.
        fields: of the documents and their parts, by name; all that have a field of the name get it.
    """
    if unknown := fields.keys() - _FIELDS:
        raise TypeError(f"no document has a field {min(unknown)}")
    is_shared = fields.get("ipc_type") == "shm"
    options = _DEFAULTS | fields
    options["shm_directory"] = "/dev/shm" if is_shared else ""
    options["modalities"] = modalities_for(max_document_pages)
    options["model"] = part_of(ModelConfig, options, path=str(Path(model).resolve()))
    options["scheduler"] = part_of(SchedulerConfig, options)
    options["media_sources"] = part_of(MediaSources, options)
    engines = [
        part_of(
            EngineConfig,
            options,
            engine_id=f"engine-{index}",
            caches=part_of(
                EngineCaches,
                options,
                warm_directory=_warm_directory(warm_directory, index),
            ),
            loras=lora_sources(tuple(loras)),
            # Each engine gets ports of its own where it is given the other addresses.
            events_bind=f"tcp://{LOOPBACK}:{events_port}" if events_port else "",
        )
        for index in range(num_engines)
    ]
    shared_bytes = (shm_bytes or engines[0].caches.ipc_bytes) if is_shared else 0
    injection = InjectionConfig(
        enabled=bool(injection_key_file), api_key_file=injection_key_file, trusted=injection_trusted
    )
    frontends = [
        part_of(
            FrontendConfig,
            options,
            frontend_id=f"frontend-{index}",
            shm_bytes=shared_bytes // num_frontends,
            injection=injection,
        )
        for index in range(num_frontends)
    ]
    first = frontends[0]
    placed = connect(engines, frontends, first.host, first.port, pick_port)
    return list(placed[0]), list(placed[1])


_OPTIONS = _FIELDS - {"revision"} | (local_documents.__kwdefaults__ or {}).keys()
"""Of the command's, those that `local_documents` takes as they are: the model's revision is that of
the hub, and no document's."""


def _warm_directory(parent: str, engine: int) -> str:
    """Each engine has a directory of its own."""
    return str(Path(parent).resolve() / f"engine-{engine}") if parent else ""
