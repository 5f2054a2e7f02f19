"""The page of known pains: every test that it names exists, and what it calls solved has one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.markdown import ROOT

PAGE = ROOT / "docs" / "known-pains.md"
STATES = ["Solved", "Partly", "Not solved"]
_LIST = re.compile(r"^- \[[^\]]+\]\(\.\./(tests/[^)]+\.py)\):((?:.|\n(?!\n|- |#))*)", re.M)
_NAME = re.compile(r"`(\w+)`")
_THREAD = re.compile(r"\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)")


def complaints(text: str) -> Iterator[tuple[str, str, str]]:
    """(state, title, text) of every complaint."""
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        state, _, rest = part.partition("\n")
        for complaint in re.split(r"^### ", rest, flags=re.M)[1:]:
            title, _, body = complaint.partition("\n")
            yield state, title, body


def named(text: str) -> list[tuple[str, str]]:
    """(file, function) of every test that a text names in its lists."""
    return [(file, name) for file, names in _LIST.findall(text) for name in _NAME.findall(names)]


def functions(source: str) -> set[str]:
    """Names of the functions at the top of a module, where pytest looks for tests."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.parse(source).body if isinstance(node, kinds)}


FOUND = list(complaints(PAGE.read_text(encoding="utf-8")))


def test_every_complaint_has_a_state_and_a_thread() -> None:
    assert list(dict.fromkeys(state for state, _, _ in FOUND)) == STATES
    for _, title, text in FOUND:
        assert _THREAD.search(text), title


@pytest.mark.parametrize(("state", "title", "text"), FOUND, ids=[title for _, title, _ in FOUND])
def test_what_is_claimed_has_its_tests(state: str, title: str, text: str) -> None:
    tests = named(text)
    for file, name in tests:
        path = ROOT / file
        assert path.is_file(), f"{title}: {file} does not exist"
        assert name in functions(path.read_text(encoding="utf-8")), f"{title}: {file} lacks {name}"
    # A name outside of the lists would be checked by nobody.
    assert set(re.findall(r"`(test_\w+)`", text)) == {name for _, name in tests}, title
    if state == "Solved":
        assert tests, f"{title}: no test is named"
    if state == "Partly":
        assert "Weaker:" in text, f"{title}: say what is weaker"


SAMPLE = """## Solved

### A

B

- [x](../tests/a.py): `test_b`,
  `test_c`
- [y](../tests/d.py):
  `e`

`f`
"""


def test_lists_and_functions_are_read() -> None:
    [(state, title, body)] = complaints(SAMPLE)
    assert (state, title) == ("Solved", "A")
    assert named(body) == [("tests/a.py", "test_b"), ("tests/a.py", "test_c"), ("tests/d.py", "e")]
    source = "def a():\n    def b(): pass\nasync def c(): pass\nclass D:\n    def e(): pass"
    assert functions(source) == {"a", "c"}
