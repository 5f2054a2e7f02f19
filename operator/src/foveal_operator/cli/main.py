"""The `foveal` command: parses arguments, runs one subcommand, turns its result into an exit code.

Exit codes are in common/errors.py. Usable as `kubectl foveal` too. Holds no behaviour of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from foveal_operator.cli import completion
from foveal_operator.cli.arguments import Help
from foveal_operator.cli.dashboard import command as cli_dashboard
from foveal_operator.cli.doctor import command as cli_doctor
from foveal_operator.cli.local import command as cli_up
from foveal_operator.cli.local import runtime as cli_runtime
from foveal_operator.cli.plan import command as cli_plan
from foveal_operator.cli.status import command as cli_status
from foveal_operator.common.errors import (
    EXIT_CODES,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    CommandError,
)
from foveal_operator.common.versions import installed_version
from foveal_runtime.plan.errors import file_problem


def parser() -> argparse.ArgumentParser:
    """Arguments of every subcommand."""
    root = argparse.ArgumentParser(
        prog="kubectl foveal" if Path(sys.argv[0]).name == "kubectl-foveal" else "foveal",
        description="Multimodal models on Kubernetes: budgets first, then pods.",
        epilog=EXIT_CODES,
        formatter_class=Help,
    )
    installed = installed_version("foveal-operator", "0+unknown")
    root.add_argument("--version", action="version", version=f"foveal {installed}")
    commands = root.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )
    cli_plan.add_parser(commands)
    cli_up.add_parser(commands)
    cli_runtime.add_parsers(commands)
    cli_status.add_parsers(commands)
    cli_dashboard.add_parser(commands)
    cli_doctor.add_parser(commands)
    completion.add_parser(commands)
    return root


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    try:
        completion.answer(parser())
        if not given:
            parser().print_help(sys.stderr)
            return EXIT_USAGE
        if given[0] in cli_runtime.HANDED_ON:
            cli_runtime.hand_on(given)
        arguments = parser().parse_args(given)
        return int(arguments.run(arguments))
    except CommandError as error:
        print(f"foveal: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has seen enough (| head).
        sys.stderr.close()
        return EXIT_OK
    except OSError as error:
        if not (said := file_problem(error)):
            raise
        print(f"foveal: {said}", file=sys.stderr)
        return EXIT_USAGE


NO_FILES, NO_FILES_NO_SPACE = ":4", ":6"
"""Cobra's directives; a folder is offered without a space after it."""


def complete(argv: Sequence[str] | None = None) -> int:
    """`kubectl_complete-foveal`, the program that kubectl runs for Tab behind `kubectl foveal`.

    kubectl runs it with the words so far, the unfinished one last, and takes a candidate a line,
    each with its meaning behind a tab, then a directive: the shell adds no file names of its own.
    """
    words = list(sys.argv[1:] if argv is None else argv) or [""]
    found = completion.candidates(parser(), words)
    for word, meaning in found:
        print(f"{word}\t{meaning}" if meaning else word)
    print(NO_FILES_NO_SPACE if any(word.endswith("/") for word, _ in found) else NO_FILES)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
