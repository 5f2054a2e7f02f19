"""`foveal serve MODEL`: a model's name to a deployment of this machine, in one command.

Checks what can be checked without loading anything, finds the model, plans its memory as the
operator does, writes the documents that the operator writes from a resource, and runs them as
`launch` does.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

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
    size_up,
)
from foveal_runtime.plan import machine
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.config import (
    DEFAULT_DOCUMENT_PAGES,
    GIB,
    MIB,
    EngineCaches,
    EngineConfig,
    FrontendConfig,
    InjectionConfig,
    ItemSize,
    KVDtype,
    MediaSources,
    ModalitiesConfig,
    ModelConfig,
    Pooling,
    SchedulerConfig,
    Task,
    ToolFormat,
)
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LOOPBACK, LocalDeploymentConfig, connect, free_port
from foveal_runtime.plan.lora import LORA_WEIGHTS, LoraSource, check_lora_names, lora_sources
from foveal_runtime.plan.machine_plan import plan_lines
from foveal_runtime.plan.profile import ModelProfile, ProfileLimits

Part = TypeVar("Part", bound=msgspec.Struct)
_PACKAGES = ("torch", "transformers", "fastapi", "uvicorn", "zmq", "PIL", "safetensors")
_FILES = ("api_key_file", "admin_key_file", "injection_key_file", "profile")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C. Raises StartupError."""
    if arguments.print_config:
        sys.stdout.write(printed(arguments))
        return 0
    _check_options(arguments)
    here = machine.look()
    needed = arguments.num_engines * arguments.tensor_parallel
    arguments.device = choose_device(arguments.device, here, needed)
    if not arguments.plan:  # before anything is downloaded
        for number in range(arguments.num_frontends if arguments.port else 0):
            check_port(arguments.host, arguments.port + number)
    found = find_model(arguments.model, arguments.revision)
    profile = find_profile(arguments, found.path, arguments.device)
    sources = lora_sources(arguments.loras)
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

    file = Path(source.path) / LORA_WEIGHTS
    if not file.is_file():
        return 0  # the engine says what is wrong with it
    numbers = sum(math.prod(one.shape) for one in file_header(file).values())
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
    if arguments.file_root and not Path(arguments.file_root).is_dir():
        raise StartupError(f"--file-root {arguments.file_root}: there is no such directory")
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


def _options(arguments: argparse.Namespace) -> dict[str, object]:
    values = {name: getattr(arguments, name, None) for name in LocalOptions.__struct_fields__}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return {name: value for name, value in values.items() if value is not None}


def _planned(arguments: argparse.Namespace, found: Found, plan: BudgetPlan) -> LocalOptions:
    """Every size as it was planned."""
    return LocalOptions(
        **{  # type: ignore[arg-type]
            **_options(arguments),
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
        }
    )


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
    options: LocalOptions, arguments: argparse.Namespace, items: dict[str, ItemSize]
) -> LocalDeploymentConfig:
    engines, frontends = local_documents(options, free_port)
    engines = [msgspec.structs.replace(engine, items=items) for engine in engines]
    return LocalDeploymentConfig(
        name=frontends[0].model.served_name,
        engines=tuple(engines),
        frontends=tuple(frontends),
        folder=tempfile.mkdtemp(prefix="foveal-"),
        keep_folder=False,
        devices_per_engine=options.tensor_parallel if options.device == "cuda" else 0,
        start_timeout_seconds=arguments.start_timeout_seconds,
        drain_timeout_seconds=arguments.drain_timeout_seconds + 15.0,
        view="line",
    )


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `foveal-runtime serve` takes; sizes in bytes.

    `shm_bytes` is all frontends' together; 0 = as much as one engine's value cache holds.
    """

    model: str
    name: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    num_frontends: int = 1
    num_engines: int = 1
    processes: int = 1
    dtype: str = "auto"
    max_model_len: int = 0
    max_num_batched_tokens: int = 2048
    max_num_mixed_tokens: int = 0
    target_itl_ms: int = 0
    max_num_seqs: int = 128
    block_size: int = 16
    kv_dtype: KVDtype = "auto"
    kv_bytes: int = 1 * GIB
    snapshot_bytes: int = 256 * MIB
    ipc_bytes: int = 4 * GIB
    ipc_type: str = "inline"
    processor_bytes: int = 4 * GIB
    shm_bytes: int = 0
    ipc_staging_bytes: int = 256 * MIB
    max_num_encoder_input_tokens: int = 0
    encoder_embeds: int = 0
    encoder_host_bytes: int = 0
    encoder_eviction: str = "lru"
    warm_directory: str = ""
    prefix_caching: bool = True
    device: str = "cpu"
    attention: str = "auto"
    run_ahead: str = "auto"
    cuda_graphs: bool = True
    num_threads: int = 0
    media_workers: int = 0
    tensor_parallel: int = 1
    loras: tuple[str, ...] = ()
    lora_bytes: int = 0
    allowed_domains: tuple[str, ...] = ()
    file_root: str = ""
    allowed_origins: tuple[str, ...] = ()
    ignore_unknown_options: bool = False
    media_embeds: bool = False
    max_document_pages: int = DEFAULT_DOCUMENT_PAGES
    task: Task = "generate"
    pooling: Pooling | Literal[""] = ""
    tool_format: ToolFormat | Literal[""] = ""
    page: bool = True
    api_key_file: str = ""
    admin_key_file: str = ""
    injection_key_file: str = ""
    injection_trusted: bool = False
    log_format: str = "auto"
    drain_timeout_seconds: float = 120.0
    idle_check_seconds: float = 0.0
    events_port: int = 0
    events_format: Literal["vllm", "foveal"] = "vllm"
    events_topic: str = ""


def _warm_directory(parent: str, engine: int) -> str:
    """Each engine has a directory of its own."""
    return str(Path(parent).resolve() / f"engine-{engine}") if parent else ""


def local_documents(
    options: LocalOptions, pick_port: Callable[[], int]
) -> tuple[list[EngineConfig], list[FrontendConfig]]:
    """Documents for `num_engines` engines and `num_frontends` frontends on loopback.

    The first frontend listens on `options.port`, the next ones on the ports after it (0: any free
    ports); its /metrics shows every other process too.
    """
    path = str(Path(options.model).resolve())
    model = _part(ModelConfig, options, path=path)
    engines = [_engine(options, model, i) for i in range(options.num_engines)]
    frontends = [_frontend(options, model, i) for i in range(options.num_frontends)]
    placed = connect(engines, frontends, options.host, options.port, pick_port)
    return list(placed[0]), list(placed[1])


def _shared_memory(options: LocalOptions) -> str:
    return "/dev/shm" if options.ipc_type == "shm" else ""


def _part(kind: type[Part], options: LocalOptions, **own: Any) -> Part:
    """A document or a part of one: the options of the same names, and what is its `own`."""
    shared = set(kind.__struct_fields__) & set(options.__struct_fields__)
    return kind(**{name: getattr(options, name) for name in shared} | own)


def _engine(options: LocalOptions, model: ModelConfig, index: int) -> EngineConfig:
    caches = _part(
        EngineCaches,
        options,
        warm_directory=_warm_directory(options.warm_directory, index),
        kv_touched=False,  # nothing limits it here, and other programs want memory, too
    )
    return _part(
        EngineConfig,
        options,
        engine_id=f"engine-{index}",
        model=model,
        scheduler=_part(SchedulerConfig, options),
        caches=caches,
        loras=lora_sources(options.loras),
        modalities=modalities_for(options.max_document_pages),
        shm_directory=_shared_memory(options),
        # Each engine gets ports of its own where it is given the other addresses.
        events_bind=f"tcp://{LOOPBACK}:{options.events_port}" if options.events_port else "",
    )


def _frontend(options: LocalOptions, model: ModelConfig, index: int) -> FrontendConfig:
    shm = _shared_memory(options)
    shm_bytes = (options.shm_bytes or options.ipc_bytes) if shm else 0
    injection = InjectionConfig(
        enabled=bool(options.injection_key_file),
        api_key_file=options.injection_key_file,
        trusted=options.injection_trusted,
    )
    return _part(
        FrontendConfig,
        options,
        frontend_id=f"frontend-{index}",
        model=model,
        shm_directory=shm,
        shm_bytes=shm_bytes // options.num_frontends,
        media_sources=_part(MediaSources, options),
        injection=injection,
        modalities=modalities_for(options.max_document_pages),
    )
