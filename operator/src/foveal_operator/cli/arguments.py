"""Arguments of commands: their parsers and --help, kubectl's flags, and the files, sizes and times
that users give. Every fault is a UsageError or argparse's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from foveal_operator.api.crd import GROUP, PLURAL, VERSION
from foveal_operator.api.parse import InferenceSpec, SpecError, parse
from foveal_operator.common.errors import ClusterAnswerError, UsageError
from foveal_operator.kube.reader import KubeReader, Reader
from foveal_operator.kube.types import Obj
from foveal_runtime.plan import profile as model_profile
from foveal_runtime.plan.config import MIB
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import parse_bytes

OUTPUTS = ("table", "json", "yaml")
MAX_FILE_BYTES = 4 << 20
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Connect = Callable[[argparse.Namespace], Reader]


class Help(argparse.HelpFormatter):
    """For `formatter_class`. Examples and tables are indented, so they keep their lines."""

    def __init__(self, prog: str, **options: int) -> None:
        super().__init__(prog, max_help_position=28, **options)

    def add_argument(self, action: argparse.Action) -> None:
        """Commands stand two columns further in than argparse counts: their help went below."""
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        groups = itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " "))
        for is_literal, group in groups:
            found = list(group)
            lines += found if is_literal else textwrap.wrap(" ".join(found), width)
        return "\n".join(indent + line for line in lines)


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    run: Callable[[argparse.Namespace], int],
    description: str,
    epilog: str,
) -> argparse.ArgumentParser:
    """The parser of one subcommand, without arguments yet."""
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=Help
    )
    parser.set_defaults(run=run)
    return parser


def installed_version(distribution: str, otherwise: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return otherwise


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The same names as kubectl's."""
    group = parser.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", default="", metavar="NAME",
                       help="default: the context's")  # fmt: skip
    group.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")
    group.add_argument("--kubeconfig", default="", metavar="FILE", help="default: $KUBECONFIG")


def connect(arguments: argparse.Namespace) -> Reader:
    """Raises NotConfiguredError."""
    return KubeReader(arguments.kubeconfig, arguments.context, arguments.namespace)


def inferences_path(namespace: str, name: str = "") -> str:
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{path}/{name}" if name else path


def get_inference(reader: Reader, name: str) -> Obj:
    """Raises ClusterAnswerError when there is no such resource, saying which there are."""
    found = reader.get(inferences_path(reader.namespace, name))
    if found is not None:
        return found
    names = ", ".join(sorted(item["metadata"]["name"] for item in list_inferences(reader)))
    raise ClusterAnswerError(
        f"there is no {PLURAL}.{GROUP} {name!r} in namespace {reader.namespace}; there is "
        f"{names or 'none'}"
    )


def list_inferences(reader: Reader) -> list[Obj]:
    """Those of the namespace. Raises ClusterAnswerError where nobody has installed the resource."""
    found = reader.get(inferences_path(reader.namespace))
    if found is None:
        raise ClusterAnswerError(
            f"the cluster does not know {PLURAL}.{GROUP}: install Foveal's chart first"
        )
    return list(found.get("items") or ())


def formatted(value: Any, output: str) -> str:
    """JSON or YAML with a stable order."""
    if output == "json":
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)


def duration(text: str) -> float:
    """Seconds of 90, 90s, 1m30s, 2h. Raises ArgumentTypeError."""
    if text.replace(".", "", 1).isdigit():
        return float(text)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 10m or 1h30m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def size(text: str) -> int:
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if 0 < found < MIB:
        raise argparse.ArgumentTypeError(
            f"{text} is {found} bytes; did you mean {text.rstrip('mu')}Gi?"
        )
    return found


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


def read_resource(path: str) -> InferenceSpec:
    """The one MultiModalInference of a file that may hold other objects beside it."""
    return _read_both(path)[1]


def read_resource_object(path: str) -> dict[str, Any]:
    """The same as it stands in the file, once it has been found in order."""
    return _read_both(path)[0]


def _read_both(path: str) -> tuple[dict[str, Any], InferenceSpec]:
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
        return found[0], parse(found[0])
    except SpecError as error:
        raise invalid(path, error) from error


def read_profile(path: str) -> ModelProfile:
    try:
        return model_profile.decode(_read(path, "profile").encode())
    except StartupError as error:
        raise UsageError(
            f"{path}: {error.message}; make one with `foveal-runtime profile MODEL_DIRECTORY`"
        ) from error


def invalid(path: str, error: SpecError) -> UsageError:
    """The error about a file whose resource has problems; a single one stands on its line."""
    head = f"{'standard input' if path == '-' else path} is not a valid MultiModalInference:"
    if len(error.problems) == 1:
        return UsageError(f"{head}{bullets(error)[1:]}")
    return UsageError(f"{head}\n{bullets(error)}")


def bullets(error: SpecError) -> str:
    return "\n".join(f"  {path}: {what}" for path, what in error.problems)
