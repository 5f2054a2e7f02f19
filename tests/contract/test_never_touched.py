"""The table of what is never touched: each row names tests that exist, and the code's own lists."""

from __future__ import annotations

import ast
import re

import pytest

from foveal_operator.api.crd import RESERVED_NAMES
from foveal_operator.kube.kinds import KINDS
from foveal_operator.manifests import access
from foveal_operator.reconcile.apply import ADOPT
from tests.support import regenerate
from tests.support.markdown import ROOT

TEXT = regenerate.NEVER_TOUCHED_PAGE.read_text(encoding="utf-8")
HEAD, _, BODY = TEXT.partition("| object | what the operator does | shown by |\n|---|---|---|\n")
ROWS = [[cell.strip() for cell in row.strip("|").split("|")]
        for row in BODY.partition("\n\n")[0].splitlines()]  # fmt: skip
_FILE = re.compile(r"\[(test_\w+\.py)\]\(\.\./\.\./(tests/[\w/]+\.py)\): ((?:`test_\w+`(?:, )?)+)")


def _functions(file: str) -> dict[str, bool]:
    """The tests of a file, and whether something skips them in any case."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {
        node.name: any("mark.skip(" in ast.unparse(one) for one in node.decorator_list)
        for node in tree.body
        if isinstance(node, kinds) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", ROWS, ids=[row[0][:40] for row in ROWS])
def test_each_row_names_tests_that_exist(row: list[str]) -> None:
    _, does, shown = row
    assert does
    named = [(file, name) for _, file, names in _FILE.findall(shown)
             for name in re.findall(r"`(\w+)`", names)]  # fmt: skip
    assert named, "no test is named"
    assert {name for _, name in named} == set(re.findall(r"`(\w+)`", shown))
    for file, name in named:
        found = _functions(file)
        assert name in found, f"{file} lacks {name}"
        assert not found[name], f"{file}: {name} never runs"


def test_the_table_is_not_cut_short() -> None:
    assert len(ROWS) >= 11
    assert all(len(row) == 3 for row in ROWS)


def test_reserved_names_and_the_annotation_are_the_codes_own() -> None:
    (reserved,) = [row for row in ROWS if "the CRD refuses them" in row[1]]
    assert set(re.findall(r"`(\w+)`", reserved[1])) == set(RESERVED_NAMES)
    (adopted,) = [row for row in ROWS if "adopt" in row[0]]
    assert f"`{ADOPT}: RESOURCE`" in adopted[0]


def test_rights_are_listed_kind_by_kind_as_the_roles_give_them() -> None:
    assert regenerate.never_touched_page() == TEXT, "run: make generate"
    rows = {row.split(" | ")[0][2:]: row for row in TEXT.splitlines() if row.count(" | ") == 4}
    assert rows.keys() - {"kind"} == {kind.name for kind in KINDS}
    assert rows["Secret"] == "| Secret | – | yes | – | – |"
    assert rows["MultiModalInference"] == "| MultiModalInference | yes | – | its status | – |"
    assert rows["Lease"] == "| Lease | its own | yes | its own | – |"
    assert rows["Node"] == "| Node | yes | – | – | – |"


def test_a_right_that_is_new_changes_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    special = {**access._SPECIAL, "Secret": ("create", "get", "delete")}
    monkeypatch.setattr(access, "_SPECIAL", special)
    assert "| Secret | yes | yes | – | yes |" in regenerate.never_touched_page()
