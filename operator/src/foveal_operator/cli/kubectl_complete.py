"""`kubectl_complete-foveal`: the program that kubectl runs for Tab behind `kubectl foveal`.

kubectl runs it with the words so far, the unfinished one last, and takes a candidate a line, each
with its meaning behind a tab, then a directive: the shell adds no file names of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from foveal_operator.cli.completion import candidates
from foveal_operator.cli.main import parser
from foveal_operator.common.errors import EXIT_OK

NO_FILES, NO_FILES_NO_SPACE = ":4", ":6"
"""Cobra's directives; a folder is offered without a space after it."""


def main(argv: Sequence[str] | None = None) -> int:
    found = candidates(parser(), list(sys.argv[1:] if argv is None else argv) or [""])
    for word, meaning in found:
        print(f"{word}\t{meaning}" if meaning else word)
    print(NO_FILES_NO_SPACE if any(word.endswith("/") for word, _ in found) else NO_FILES)
    return EXIT_OK
