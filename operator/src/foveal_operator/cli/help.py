"""Format of --help: paragraphs wrapped to the terminal, indented lines unchanged."""

from __future__ import annotations

import argparse
import itertools
import textwrap


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
