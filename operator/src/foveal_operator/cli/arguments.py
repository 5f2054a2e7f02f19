"""Arguments of commands: their parsers and --help, kubectl's flags, and sizes and times that users
give. Every fault is a UsageError or argparse's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import textwrap
from collections.abc import Callable
from typing import Any, TypeAlias

import yaml

from foveal_operator.kube.reader import KubeReader, Reader
from foveal_runtime.plan.config import MIB
from foveal_runtime.plan.quantity import parse_bytes

OUTPUTS = ("table", "json", "yaml")
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


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The same names as kubectl's."""
    group = parser.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", default="", metavar="NAME",
                       help="default: the context's")  # fmt: skip
    group.add_argument("--context", default="", metavar="NAME", help="of the kubeconfig")
    group.add_argument("--kubeconfig", default="", metavar="FILE", help="default: $KUBECONFIG")


def connect(arguments: argparse.Namespace) -> Reader:
    """Raises NotConfiguredError, or ClusterAnswerError for a malformed kubeconfig."""
    return KubeReader(arguments.kubeconfig, arguments.context, arguments.namespace)


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
