"""`kubectl_complete-foveal`: what kubectl asks when Tab is pressed behind `kubectl foveal`.

kubectl runs it with the words so far, the unfinished one last, and takes a candidate a line, each
with its meaning behind a tab, then a line that says whether file names may follow. Asks no cluster.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from foveal_operator.cli.completion import Command, commands_of
from foveal_operator.cli.main import parser
from foveal_operator.common.errors import EXIT_OK

WITH_FILES, WITHOUT_FILES = ":0", ":4"
"""Cobra's directives: the shell may add files, or must not."""


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv) or [""]
    found, directive = candidates(list(commands_of(parser())), words)
    for word, meaning in found:
        if word.startswith(words[-1]):
            print(f"{word}\t{meaning}" if meaning else word)
    print(directive)
    return EXIT_OK


def candidates(
    commands: Sequence[Command], words: Sequence[str]
) -> tuple[list[tuple[str, str]], str]:
    """(word, meaning) of all that may stand where the last word does, and the directive."""
    if len(words) == 1:
        return [(command.name, command.help) for command in commands], WITHOUT_FILES
    command = next((one for one in commands if one.name == words[0]), None)
    if command is None:
        return [], WITHOUT_FILES
    for option in command.options:
        if words[-2] in option.names and option.takes:
            directive = WITH_FILES if option.is_file else WITHOUT_FILES
            return [(choice, "") for choice in option.choices], directive
    return list(_of_command(command, words)), WITHOUT_FILES


def _of_command(command: Command, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    if len(words) == 2:
        yield from ((word, "") for word in command.words)
    for option in command.options:
        yield from ((name, option.help) for name in option.names)
