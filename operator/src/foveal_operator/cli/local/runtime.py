"""`foveal-runtime` as a program: found for `foveal up`, handed on to by `foveal serve`.

The operator never imports the runtime beyond plan/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from foveal_operator.common.errors import UsageError

HANDED_ON = {
    "serve": "serve a model on this machine, sized to it",
    "fetch": "download a model into a directory",
    "profile": "what a model costs, as JSON",
}
"""Commands of the runtime, which is installed alone on machines without a cluster."""


def runtime_command(given: str = "") -> list[str]:
    """How `foveal-runtime` is called: as told, as this Python's module, or from PATH."""
    if given:
        found = shutil.which(given)
        if not found:
            raise UsageError(f"--runtime {given} is no program that can be run")
        return [found]
    # With its packages: the operator's image holds the runtime's files for plan/, without torch.
    if find_spec("foveal_runtime.main") is not None and find_spec("transformers") is not None:
        return [sys.executable, "-m", "foveal_runtime.main.cli"]
    found = shutil.which("foveal-runtime")
    own = Path(sys.executable).with_name("foveal-runtime")
    if not found or Path(found) == own:
        raise UsageError(
            "foveal-runtime is not installed here; pip install 'foveal-runtime[frontend,engine]'"
        )
    return [found]


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """For `foveal --help`; `hand_on` runs them before anything is parsed."""
    for name, text in HANDED_ON.items():
        commands.add_parser(name, help=text, add_help=False)


def hand_on(arguments: list[str]) -> None:
    """Becomes `foveal-runtime` with the same arguments. Raises UsageError when it is missing."""
    command = [*runtime_command(), *arguments]
    os.execvpe(command[0], command, {**os.environ, "FOVEAL_PROGRAM": "foveal"})
