"""`foveal-runtime launch --config FILE`: a local deployment that runs until Ctrl-C.

`foveal up` and `foveal-runtime serve` write the document; this runs it, shows it, and leaves the
logs behind when something failed.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from foveal_runtime.main.launcher import RUNTIME, LocalDeployment
from foveal_runtime.main.local.supervisor import Interrupted, Supervisor
from foveal_runtime.main.local.view import View
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LocalDeploymentConfig


def run(path: str, command: str = "") -> int:
    """`command`: what runs the processes; default: this Python's module. Raises StartupError."""
    try:
        config = msgspec.json.decode(Path(path).read_bytes(), type=LocalDeploymentConfig)
    except OSError as error:
        raise StartupError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise StartupError(f"deployment {path}: {error}") from error
    return launch(config, tuple(shlex.split(command)) or RUNTIME)


def launch(config: LocalDeploymentConfig, command: tuple[str, ...] = RUNTIME) -> int:
    """Serves until a signal, returns 0. Raises StartupError."""
    deployment = LocalDeployment(
        config.engines,
        config.frontends,
        folder=config.folder,
        devices_per_engine=config.devices_per_engine,
        command=command,
    )
    console = Console(file=sys.stdout, highlight=False)
    keep = config.keep_folder
    try:
        with View(console, config.view) as view:
            view.say(
                f"starting {len(config.engines)} engine(s) and {len(config.frontends)} "
                f"frontend(s); documents and logs: {config.folder}"
            )
            Supervisor(
                config.name,
                deployment,
                show=view.show,
                say=view.say,
                start_timeout_seconds=config.start_timeout_seconds,
                drain_timeout_seconds=config.drain_timeout_seconds,
            ).run()
        console.print("drained and ended")
        return 0
    except Interrupted:
        raise
    except StartupError:
        keep = True
        raise
    finally:
        for folder in (*config.scratch, *(() if keep else (config.folder,))):
            shutil.rmtree(folder, ignore_errors=True)
