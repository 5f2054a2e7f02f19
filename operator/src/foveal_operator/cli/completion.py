"""Shell completion: the script that `foveal completion` prints, and the answers to its questions.

The parsers themselves say what may follow, by way of argcomplete; no cluster is asked.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import TextIO

from argcomplete.completers import FilesCompleter, SuppressCompleter
from argcomplete.finders import CompletionFinder
from argcomplete.shell_integration import shellcode

from foveal_operator.cli.arguments import Commands, add_command
from foveal_operator.cli.local.runtime import HANDED_ON, hand_on, runtime_command
from foveal_operator.common.errors import EXIT_OK, UsageError

_EPILOG = """\
  bash:  source <(foveal completion bash)        # in ~/.bashrc
  zsh:   source <(foveal completion zsh)         # in ~/.zshrc, after compinit
  fish:  foveal completion fish | source         # in ~/.config/fish/config.fish
"""
_FILES = ("FILE", "DIRECTORY", "PROGRAM")
_ASKED = "_ARGCOMPLETE"


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "completion", "a script for bash, zsh or fish", run,
                         "Prints a completion script.", _EPILOG)  # fmt: skip
    parser.add_argument("shell", choices=["bash", "fish", "zsh"])


def run(arguments: argparse.Namespace) -> int:
    programs = ["foveal", "kubectl-foveal", "foveal-runtime"]
    print(shellcode(programs, use_defaults=False, shell=arguments.shell))
    return EXIT_OK


def answer(root: argparse.ArgumentParser, output: TextIO | None = None) -> None:
    """Ends the process with the candidates when a shell's script asks; does nothing otherwise."""
    if _ASKED not in os.environ:
        return
    words = os.environ.get("COMP_LINE", "").split()
    if words[1:2] and words[1] in HANDED_ON:
        _hand_on(words[1:], output)
        return
    for action in _actions(root):
        if action.metavar in _FILES:
            action.completer = FilesCompleter()  # type: ignore[attr-defined]
    finder = CompletionFinder()
    finder(
        root,
        exit_method=os._exit if output is None else _go_on,
        output_stream=output,
        default_completer=SuppressCompleter(),
    )


def _hand_on(words: list[str], output: TextIO | None) -> None:
    """Lets the runtime answer for its commands: its options are its own."""
    try:
        if output is None:
            hand_on(words)
        with tempfile.NamedTemporaryFile("r", encoding="utf-8") as file:
            environment = {**os.environ, "_ARGCOMPLETE_STDOUT_FILENAME": file.name}
            subprocess.run(runtime_command(), env=environment, capture_output=True, timeout=30)
            assert output is not None
            output.write(file.read())
    except (UsageError, OSError, subprocess.SubprocessError):
        if output is None:
            os._exit(EXIT_OK)  # no candidates: a shell shows no errors here


def candidates(root: argparse.ArgumentParser, words: Sequence[str]) -> list[tuple[str, str]]:
    """(word, meaning) of all that may stand where the last word does.

    For a process that does nothing else: argcomplete takes its question from the environment, and
    file descriptor 9 for its own log.
    """
    line = f"{shlex.join(['foveal', *words[:-1]])} {words[-1]}"
    os.environ |= {
        _ASKED: "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_DFS": "\t",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
    }  # fmt: skip
    output = io.StringIO()
    answer(root, output)
    found = [line.partition("\t") for line in output.getvalue().splitlines()]
    return [(word, meaning) for word, _, meaning in found]


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        yield action


def _go_on(code: int) -> None:
    """Instead of ending the process."""
