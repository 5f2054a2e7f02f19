"""`foveal serve MODEL`: a model's name to a deployment of this machine, in one command.

Checks what can be checked without loading anything, finds the model, plans its memory as the
operator does, and runs the documents as `launch` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from foveal_runtime.main.documents import LocalOptions, local_documents
from foveal_runtime.main.launcher import check_port
from foveal_runtime.main.local.launch import launch
from foveal_runtime.main.local.model import Found, find_model
from foveal_runtime.main.local.options import printed
from foveal_runtime.main.local.sizing import choose_device, describe, find_profile, size_up
from foveal_runtime.plan import machine
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LocalDeploymentConfig, free_port
from foveal_runtime.plan.machine_plan import plan_lines

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
    plan = size_up(arguments, profile, arguments.device, here)
    print(f"{found.name} on {arguments.device}: {describe(here, arguments.device)}")
    for line in plan_lines(plan, arguments.num_frontends, arguments.num_engines):
        print(line)
    sys.stdout.flush()
    if arguments.plan:
        return 0
    return launch(_config(_planned(arguments, found, plan), arguments))


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
            "ipc_bytes": plan.ipc_bytes,
            "ipc_staging_bytes": plan.ipc_staging_bytes,
            "processor_bytes": plan.processor_bytes,
            "encoder_embeds": plan.encoder_embeds,
            "encoder_host_bytes": plan.encoder_host_bytes,
        }
    )


def _config(options: LocalOptions, arguments: argparse.Namespace) -> LocalDeploymentConfig:
    engines, frontends = local_documents(options, free_port)
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
