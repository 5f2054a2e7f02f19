"""The `foveal` command: parses arguments, runs one subcommand, turns its result into an exit code.

Exit codes: 0 well, 2 wrong arguments, resource or profile, 3 the budgets do not fit. Usable as
`kubectl foveal` too. Holds no behaviour of its own.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version

from foveal_operator import cli_plan
from foveal_operator.cli_errors import UsageError

EXIT_CODES = """\
exit codes:
  0  well
  2  wrong arguments, resource, podTemplate or profile
  3  the budgets do not fit (plan)
"""


def parser() -> argparse.ArgumentParser:
    """Arguments of every subcommand."""
    root = argparse.ArgumentParser(
        prog="foveal",
        description="Multimodal models on Kubernetes: budgets first, then pods.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("--version", action="version", version=f"foveal {_version()}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")
    cli_plan.add_parser(commands)
    return root


def _version() -> str:
    try:
        return version("foveal-operator")
    except PackageNotFoundError:
        return "0+unknown"


def main(argv: list[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"foveal: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has seen enough (| head).
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
