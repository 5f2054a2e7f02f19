"""`foveal plan`: every budget and every object of a resource, without a cluster.

The same functions as the operator's, so what `-o yaml` prints is what it applies (less the owner
reference, which only a cluster can give).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import yaml

from foveal_operator.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.cli_errors import UsageError
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.render import desired_yaml, plan_json
from foveal_operator.spec import InferenceSpec, SpecError, parse
from foveal_operator.table import Style, plan_table
from foveal_runtime.plan import profile as model_profile
from foveal_runtime.plan.budget import plan
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import parse_bytes

OPTIONAL_APIS = (
    "HTTPRoute",
    "InferencePool",
    "PodMonitor",
    "PrometheusRule",
    "ResourceClaimTemplate",
    "ScaledObject",
)
MAX_FILE_BYTES = 4 << 20
_DESCRIPTION = """\
Derives every memory budget of a MultiModalInference and lists the objects the operator would own.
Needs no cluster: what nodes and devices offer is given here, or stands in the resource.
"""
_EPILOG = """\
examples:
  foveal plan -f mmi.yaml --profile profile.json --device-memory 80Gi
  foveal plan -f mmi.yaml --profile profile.json -o yaml | kubectl diff -f -
  foveal-runtime profile MODEL_DIRECTORY > profile.json     # where a profile comes from

exit codes: 0 fits, 2 wrong resource or arguments, 3 does not fit
"""


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="budgets and objects of a resource, without a cluster",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("-f", "--filename", required=True, metavar="FILE", help="the resource; - reads stdin")
    add("--profile", required=True, metavar="FILE", help="the model's costs, as JSON")
    add("--node-memory", type=_size, default=0, metavar="SIZE", help="allocatable on a node")
    add("--device-memory", type=_size, default=0, metavar="SIZE", help="memory of one device")
    add("--image", metavar="IMAGE", help="runtime image, unless the resource names one")
    add(
        "--api",
        action="append",
        default=[],
        choices=[*OPTIONAL_APIS, "all", "none"],
        help="optional API that the cluster serves (repeat; default: all)",
    )
    add("-o", "--output", choices=["table", "yaml", "json"], default="table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan. Returns 0 when it fits, 3 when it does not. Raises UsageError."""
    inference = _read_resource(arguments.filename)
    profile = _read_profile(arguments.profile)
    nodes = NodeFacts(node_bytes=arguments.node_memory, device_bytes=arguments.device_memory)
    result = plan(budget_inputs(inference, nodes), profile)
    facts = ClusterFacts(apis=_apis(arguments.api))
    if arguments.image:
        facts = ClusterFacts(apis=facts.apis, runtime_image=arguments.image)
    try:
        objects = desired(inference, result, facts)
    except SpecError as error:
        raise UsageError(f"{arguments.filename} is refused:\n{_bullets(error)}") from error
    if arguments.output == "yaml":
        sys.stdout.write(desired_yaml(objects))
    elif arguments.output == "json":
        sys.stdout.write(plan_json(result, objects))
    else:
        sys.stdout.write(plan_table(inference, profile, result, objects, _style()))
    if not result.fits and arguments.output != "table":
        for problem in result.problems:
            print(f"foveal: {problem.reason}: {problem.message}", file=sys.stderr)
    return 0 if result.fits else 3


def _style() -> Style:
    is_terminal = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return Style(is_terminal=is_terminal, width=shutil.get_terminal_size().columns)


def _apis(chosen: list[str]) -> frozenset[str]:
    if not chosen or "all" in chosen:
        return frozenset(OPTIONAL_APIS)
    return frozenset(chosen) - {"none"}


def _read(path: str, what: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} {path} is not UTF-8 text") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the {what} {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return text


def _read_resource(path: str) -> InferenceSpec:
    """The one MultiModalInference of a file that may hold other objects beside it."""
    try:
        documents = [d for d in yaml.safe_load_all(_read(path, "resource")) if d is not None]
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == "MultiModalInference"]
    if not found and len(documents) == 1:
        found = documents
    if len(found) != 1:
        raise UsageError(f"{path} holds {len(found)} MultiModalInference objects; give one")
    try:
        return parse(found[0])
    except SpecError as error:
        raise UsageError(f"{path} is refused:\n{_bullets(error)}") from error


def _read_profile(path: str) -> ModelProfile:
    try:
        return model_profile.decode(_read(path, "profile").encode())
    except StartupError as error:
        raise UsageError(
            f"{path}: {error.message}; make one with `foveal-runtime profile MODEL_DIRECTORY`"
        ) from error


def _bullets(error: SpecError) -> str:
    return "\n".join(f"  {path}: {what}" for path, what in error.problems)
