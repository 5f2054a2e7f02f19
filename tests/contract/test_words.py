"""Words that CONTRIBUTING.md rules out, in documentation, messages and module docstrings.

The table under "Words" in CONTRIBUTING.md is the only list. Code blocks and spans do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, pages, split

SOURCES = ("operator/src", "runtime/src")
COLUMNS = 110
RIDDLES = re.compile(r"(What|How|Who|Whom|Whose|Why)\b|See the module\.")


def forbidden() -> dict[str, str]:
    """Each word of the table's first column, with what to write instead."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Words\n")[2]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|$", text, flags=re.M)
    return {word: better for words, better in rows for word in re.findall(r"`([^`]+)`", words)}


FORBIDDEN = forbidden()
PATTERN = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, FORBIDDEN))})(?![\w-])", re.I)


def found(text: str, line: int = 1) -> Iterator[str]:
    """One message a forbidden word of the text, which begins in this line."""
    for match in PATTERN.finditer(text):
        better = FORBIDDEN[match[1].lower()]
        yield f"{line + text.count(chr(10), 0, match.start())}: {match[1]!r}: write {better}"


def in_page(text: str) -> Iterator[str]:
    """Of the prose: without code, and without the targets of links."""
    prose = re.sub(r"`[^`\n]*`", "", split(text)[0])
    yield from found(re.sub(r"\]\([^)\s]*\)", "]", prose))
    yield from long_lines(text)


def long_lines(text: str) -> Iterator[str]:
    """Lines of prose above 110 columns. Tables and generated pages cannot be wrapped."""
    if "do not edit" in text:
        return
    for number, line in enumerate(split(text)[0].split("\n"), 1):
        if len(line) > COLUMNS and not line.lstrip().startswith(("|", "![")):
            yield f"{number}: {len(line)} columns: at most {COLUMNS}"


def in_module(text: str) -> Iterator[str]:
    """Of the module's docstring and of every string with a space that is no docstring."""
    tree = ast.parse(text)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    head = ast.get_docstring(tree) or ""
    yield from found(head)
    if RIDDLES.match(head):
        yield f"1: begins with {head.split()[0]!r}: begin with a noun phrase that says what it is"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield from found(node.value, node.lineno) if " " in node.value else ()


def files() -> list[Path]:
    sources = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return sorted([*pages(), *sources])


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    errors = list((in_module if path.suffix == ".py" else in_page)(text))
    assert not errors, "\n".join(f"{path.relative_to(ROOT)}:{error}" for error in errors)


def test_what_is_forbidden_is_found() -> None:
    assert len(FORBIDDEN) > 20
    assert list(in_page("A\n\npicture `picture` [x](picture.md)\n")) == [
        "3: 'picture': write image"
    ]
    assert [*in_module('"""Who mends."""\nX = "a survey"\n"""A survey of X."""\n')] == [
        "1: 'mends': write fix, correct",
        "1: begins with 'Who': begin with a noun phrase that says what it is",
        "2: 'survey': write inventory, cluster facts",
    ]
