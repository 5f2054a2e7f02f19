"""`foveal-runtime` as a program: found for `foveal up`, handed on to by `foveal serve`, and run to
fetch and profile a model as the Jobs do.

The operator never imports the runtime beyond plan/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.cli.arguments import Commands
from foveal_operator.common.errors import CommandError, UsageError
from foveal_operator.manifests import ClusterFacts, desired
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile, decode

HANDED_ON = {
    "serve": "serve a model on this machine, sized to it",
    "bench": "how fast a server answers, and what its caches save",
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
        return [sys.executable, "-m", "foveal_runtime"]
    found = shutil.which("foveal-runtime")
    own = Path(sys.executable).with_name("foveal-runtime")
    if not found or Path(found) == own:
        raise UsageError(
            "foveal-runtime is not installed here; pip install 'foveal-runtime[frontend,engine]'"
        )
    return [found]


def add_parsers(commands: Commands) -> None:
    """For `foveal --help`; `hand_on` runs them before anything is parsed."""
    for name, text in HANDED_ON.items():
        commands.add_parser(name, help=text, add_help=False)


def hand_on(arguments: list[str]) -> None:
    """Becomes `foveal-runtime` with the same arguments. Raises UsageError when it is missing."""
    command = [*runtime_command(), *arguments]
    os.execvpe(command[0], command, {**os.environ, "FOVEAL_PROGRAM": "foveal"})


def find_model(inference: InferenceSpec, given: str | None, command: list[str]) -> Path:
    """The directory given, or the one that the resource's model is downloaded into. Raises
    UsageError, or CommandError when it cannot be had."""
    if given:
        if not Path(given, "config.json").is_file():
            raise UsageError(f"--model {given} holds no config.json: give a model's directory")
        return Path(given).resolve()
    model = inference.spec.model
    if model.uri.startswith("pvc://"):
        raise UsageError(f"{model.uri} is the cluster's: say where the model is with --model")
    revision = ["--revision", model.revision] if model.revision else []
    done = subprocess.run([*command, "fetch", model.uri, *revision], stdout=subprocess.PIPE)
    if done.returncode:
        raise CommandError(
            f"{model.uri} was not fetched (the line above says why; HF_TOKEN and HF_ENDPOINT are "
            "read): give --model DIRECTORY if you have it"
        )
    return Path(os.fsdecode(done.stdout).splitlines()[-1])


def find_profile(inference: InferenceSpec, model: Path, command: list[str]) -> ModelProfile:
    """What the operator's profile Job would find, by the same command. Raises CommandError."""
    job = desired(inference, None, ClusterFacts()).of_kind("Job")[-1]
    args: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    args = [args[0], str(model), *args[2 : args.index("--output")]]
    print("profiling the model (--profile FILE saves this)", flush=True)
    with tempfile.TemporaryDirectory(prefix="foveal-profile-") as folder:
        file = Path(folder) / "profile.json"
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([*command, *args, "--output", str(file)], env=environment)
        if done.returncode:
            raise CommandError(f"the model in {model} cannot be profiled")
        try:
            return decode(file.read_bytes())
        except StartupError as error:
            raise CommandError(f"the profile of {model}: {error.message}") from error
