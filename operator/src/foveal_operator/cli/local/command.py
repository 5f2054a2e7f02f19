"""`foveal up`: the pods of a resource as processes of this machine, from the same documents.

Plans with the operator's functions, reads the documents out of the ConfigMaps that a cluster would
get, adapts them (`local.documents`) and hands them to `foveal-runtime launch`, which runs them.
"""

from __future__ import annotations

import argparse
import os
import secrets
import tempfile
from pathlib import Path

import msgspec

from foveal_operator.api.parse import InferenceSpec, SpecError
from foveal_operator.api.workloads import Accelerator, Parallelism
from foveal_operator.cli.arguments import Commands, add_command, duration, size
from foveal_operator.cli.files import bullets, read_profile, read_resource
from foveal_operator.cli.local.documents import LocalDocuments, LocalPlace, adapted_documents
from foveal_operator.cli.local.runtime import find_model, find_profile, runtime_command
from foveal_operator.common.errors import EXIT_OK, MisfitError, UsageError
from foveal_operator.manifests import ClusterFacts, Desired, desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.manifests.curve_keys import make_keys
from foveal_operator.manifests.documents import document_json
from foveal_runtime.plan import machine
from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from foveal_runtime.plan.local import LOOPBACK, LocalDeploymentConfig, free_port
from foveal_runtime.plan.machine_plan import machine_plan, plan_lines, shortfall
from foveal_runtime.plan.profile import ModelProfile

_SHARED_MEMORY = "/dev/shm"
_DESCRIPTION = """\
Runs a MultiModalInference on this machine: the documents that its pods would get, as local
processes, with a live view of processes and caches. Ctrl-C drains: readiness off, streams finish,
processes end. Each process writes its log into the folder that is named at the start.
"""
_EPILOG = """\
examples:
  foveal up -f mmi.yaml --model ~/models/qwen
  foveal up -f mmi.yaml --model ~/models/qwen --cpu --port 9000
  foveal up -f mmi.yaml --model ~/models/qwen --dry-run   # documents only

A model that the resource names by hf://, s3:// or oci:// is downloaded when no --model is given.

A process that dies is started again, after a growing pause; after four deaths in a row the rest is
ended and its last lines are shown.

exit codes: 0 drained after Ctrl-C, 1 a process cannot be kept running, 2 wrong resource or
arguments, 3 does not fit this machine, 5 not ready or not drained in time, 130 ended at once by a
second Ctrl-C
"""


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "up", "run a resource on this machine, with a live view", run,
                         _DESCRIPTION, _EPILOG)  # fmt: skip
    add = parser.add_argument
    add("-f", "--filename", required=True, metavar="FILE", help="the resource; - reads stdin")
    add("--model", metavar="DIRECTORY", help="the model's files, whatever the resource names")
    add("--profile", metavar="FILE", help="the model's costs; default: computed now")
    add("--host", default=LOOPBACK, help="address of the frontends (default: %(default)s)")
    add("--port", type=int, metavar="PORT",
        help="port of the first frontend, 0 for any (default: the resource's)")  # fmt: skip
    add("--frontends", type=int, metavar="N", help="frontends (default: the resource's replicas)")
    add("--engines", type=int, metavar="N", help="engines (default: the resource's replicas)")
    add("--cpu", action="store_true", help="run engines on the CPU, whatever the resource asks for")
    add(
        "--device-memory",
        type=size,
        default=0,
        metavar="SIZE",
        help="memory of one device (default: as found)",
    )
    add("--api-key-file", default="", metavar="FILE", help="for security.apiKeySecretRef")
    add("--admin-key-file", default="", metavar="FILE", help="for security.adminKeySecretRef")
    add("--injection-key-file", default="", metavar="FILE", help="for security.injection")
    add("--file-root", default="", metavar="DIRECTORY",
        help="for security.mediaSources.localFiles")  # fmt: skip
    add("--folder", metavar="DIRECTORY", help="documents, logs and warm sets (default: temporary)")
    add("--runtime", default="", metavar="PROGRAM", help="foveal-runtime to run")
    add("--start-timeout", type=duration, metavar="SECONDS",
        help="longest start (default: the resource's progressDeadlineSeconds)")  # fmt: skip
    add("--drain-margin", type=duration, default=15.0, metavar="SECONDS",
        help="grace after the resource's drainTimeoutSeconds (default: %(default)s)")  # fmt: skip
    add("--dry-run", action="store_true", help="write the documents and name them, start nothing")


def run(arguments: argparse.Namespace) -> int:
    """Ends as the launcher ends. Raises UsageError, CommandError or MisfitError before that."""
    command = runtime_command(arguments.runtime)
    inference = _adapted(read_resource(arguments.filename), arguments)
    if not inference.num_engines or not inference.num_frontends:
        raise UsageError("the resource asks for no replicas: give --engines and --frontends")
    port = _port(inference, arguments.port)
    here = machine.look()
    _check_devices(inference, here, arguments)
    model = find_model(inference, arguments.model, command)
    profile = (
        read_profile(arguments.profile)
        if arguments.profile
        else find_profile(inference, model, command)
    )
    wanted = _wanted(inference, profile, here, arguments)
    keys, root = _key_files(arguments), _file_root(arguments)
    folder = _folder(arguments.folder)
    shared = ""
    is_shared = inference.spec.caches.ipc.type == "SharedMemory"
    if is_shared and not arguments.dry_run:  # stands for the node's shared volume
        shared = tempfile.mkdtemp(prefix="foveal-up-", dir=_SHARED_MEMORY)
    place = LocalPlace(
        model_path=str(model),
        folder=str(folder),
        host=arguments.host,
        port=port,
        shm_directory=shared or (_SHARED_MEMORY if is_shared else ""),
        num_cpus=max(1, int(here.cpus)),
        key_files=keys,
        file_root=root,
    )
    documents = adapted_documents(wanted, place, free_port)
    for note in documents.notes:
        print(f"note: {note}", flush=True)
    if arguments.dry_run:
        configs: list[EngineConfig | FrontendConfig] = [*documents.engines, *documents.frontends]
        for config in configs:
            name = config.engine_id if isinstance(config, EngineConfig) else config.frontend_id
            file = folder / f"{name}.json"
            file.write_text(document_json(config), encoding="utf-8")
            print(file)
        return EXIT_OK
    _write_curve_keys(folder)
    return _launch(inference, documents, folder, shared, command, arguments)


def _launch(
    inference: InferenceSpec,
    documents: LocalDocuments,
    folder: Path,
    shared: str,
    command: list[str],
    arguments: argparse.Namespace,
) -> int:
    """Becomes `foveal-runtime launch`: signals and the exit code are the launcher's own."""
    engine, rollout = inference.spec.engine, inference.spec.rollout
    config = LocalDeploymentConfig(
        name=inference.name,
        engines=documents.engines,
        frontends=documents.frontends,
        folder=str(folder),
        keep_folder=bool(arguments.folder),
        scratch=(shared,) if shared else (),
        devices_per_engine=engine.num_devices if engine.accelerator.type == "GPU" else 0,
        start_timeout_seconds=arguments.start_timeout or float(rollout.progress_deadline_seconds),
        drain_timeout_seconds=rollout.drain_timeout_seconds + arguments.drain_margin,
    )
    file = folder / "deployment.json"
    file.write_bytes(msgspec.json.encode(config))
    os.execvp(command[0], [*command, "launch", "--config", str(file)])


def _adapted(inference: InferenceSpec, arguments: argparse.Namespace) -> InferenceSpec:
    """The same resource as it starts here: nobody scales it, and with --cpu engines are on CPUs."""
    spec = inference.spec
    for option in ("engines", "frontends"):
        count = getattr(arguments, option)
        if count is not None and not 1 <= count <= 64:
            raise UsageError(f"--{option} {count}: give 1 to 64")
    frontend, engine = spec.frontend, spec.engine
    if arguments.frontends or frontend.autoscaling:
        fewest = frontend.autoscaling.min_replicas if frontend.autoscaling else 1
        frontend = msgspec.structs.replace(
            frontend, autoscaling=None, replicas=arguments.frontends or fewest
        )
    if arguments.engines or engine.autoscaling:
        fewest = engine.autoscaling.min_replicas if engine.autoscaling else 1
        engine = msgspec.structs.replace(
            engine, autoscaling=None, replicas=arguments.engines or fewest
        )
    if arguments.cpu and engine.accelerator.type != "CPU":
        engine = msgspec.structs.replace(
            engine, accelerator=Accelerator(type="CPU"), parallelism=Parallelism()
        )
    spec = msgspec.structs.replace(spec, frontend=frontend, engine=engine)
    return msgspec.structs.replace(inference, spec=spec)


def _check_devices(
    inference: InferenceSpec, here: machine.Machine, arguments: argparse.Namespace
) -> None:
    """Before anything is downloaded. Raises MisfitError; documents alone need no device."""
    engine = inference.spec.engine
    if engine.accelerator.type != "GPU" or (arguments.dry_run and arguments.device_memory):
        return
    num_engines = inference.num_engines
    needed = engine.num_devices * num_engines
    if needed > len(here.devices):
        fewer = "lower --engines, or " if engine.num_devices <= len(here.devices) else ""
        raise MisfitError(
            f"{inference.name} asks for {num_engines} x {engine.num_devices} GPUs and this "
            f"machine has {len(here.devices)}: {fewer}run the engines on its CPUs with --cpu"
        )


def _port(inference: InferenceSpec, given: int | None) -> int:
    port: int = inference.spec.networking.port if given is None else given
    if not 0 <= port <= 65000:
        raise UsageError(f"--port {port}: give 0 to 65000")
    return port


def _key_files(arguments: argparse.Namespace) -> dict[str, str]:
    found = {}
    for option in ("--api-key-file", "--admin-key-file", "--injection-key-file"):
        path = getattr(arguments, option[2:].replace("-", "_"))
        if path:
            if not Path(path).is_file():
                raise UsageError(f"{option} {path}: there is no such file")
            found[option] = str(Path(path).resolve())
    return found


def _file_root(arguments: argparse.Namespace) -> str:
    if arguments.file_root and not Path(arguments.file_root).is_dir():
        raise UsageError(f"--file-root {arguments.file_root}: there is no such folder")
    return str(Path(arguments.file_root).resolve()) if arguments.file_root else ""


def _wanted(
    inference: InferenceSpec,
    profile: ModelProfile,
    here: machine.Machine,
    arguments: argparse.Namespace,
) -> Desired:
    """The operator's objects, planned with this machine as the node of all processes."""
    facts = NodeFacts(device_bytes=arguments.device_memory or min(here.devices, default=0))
    counts = inference.num_frontends, inference.num_engines
    result = machine_plan(budget_inputs(inference, facts), profile, here.usable_bytes, *counts)
    if not result.fits:
        problems = "\n".join(f"  {p.reason}: {p.message}" for p in result.problems)
        raise MisfitError(f"{inference.name} does not fit this machine:\n{problems}")
    if short := shortfall(result, here.usable_bytes, *counts):
        raise MisfitError(
            f"{inference.name} does not fit this machine: {short}. Options: end other programs, "
            "lower --frontends, --engines or hostMemory of either, or a smaller model"
        )
    if not arguments.dry_run:
        for line in plan_lines(result, *counts):
            print(line)
    try:
        return desired(inference, result, ClusterFacts())
    except SpecError as error:
        raise UsageError(f"{arguments.filename} is refused:\n{bullets(error)}") from error


def _folder(given: str | None) -> Path:
    """The launcher removes a temporary one after a good end, and keeps its logs after a bad one."""
    if not given:
        return Path(tempfile.mkdtemp(prefix="foveal-up-"))
    folder = Path(given).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"--folder {given} cannot be made: {error.strerror}") from error
    return folder


def _write_curve_keys(folder: Path) -> None:
    """Fresh for each run, readable by this user alone."""
    target = folder / "curve"
    target.mkdir(mode=0o700, exist_ok=True)
    for name, text in make_keys(secrets.token_bytes).items():
        file = target / name
        file.write_text(text, encoding="ascii")
        file.chmod(0o600)
