"""Links of every page lead somewhere, and the checks themselves see what is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.markdown import ROOT, anchors, links, matches, pages, split

PAGES = pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for line, target in links(page.read_text(encoding="utf-8")):
        where = f"{page.relative_to(ROOT)}:{line}: {target}"
        if re.match(r"[a-z][a-z+.-]*:", target):
            assert target.startswith(("https://", "mailto:")), where
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT), where
        assert file.exists(), where
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), where


def test_every_page_of_the_docs_is_reached_from_the_index() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "docs" / "README.md"]
    while todo:
        page = todo.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        for _, target in links(page.read_text(encoding="utf-8")):
            path = target.partition("#")[0]
            found = (page.parent / path).resolve() if path and ":" not in path else page
            todo += found.glob("*.md") if found.is_dir() else [found]
    missing = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - seen
    assert not missing, sorted(str(page.relative_to(ROOT)) for page in missing)


def test_the_readme_leads_to_the_index() -> None:
    assert any(t == "docs/README.md" for _, t in links((ROOT / "README.md").read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_diagrams_have_no_semicolons(page: Path) -> None:
    """A semicolon ends a statement of a diagram: the one of the mirror was not drawn for it."""
    for block in split(page.read_text(encoding="utf-8"))[1]:
        assert block.info != "mermaid" or ";" not in block.text, f"{page}:{block.line}"


SAMPLE = """# One `two` [three](x)!

[a](b.md#c) `[not](this)` [`code`](d.md)

```sh run
[no](link)
```

## Twice
## Twice
"""


def test_links_anchors_and_blocks_are_seen() -> None:
    assert [target for _, target in links(SAMPLE)] == ["x", "b.md#c", "d.md"]
    assert anchors(SAMPLE) == {"one-two-three", "twice", "twice-1"}
    [block] = split(SAMPLE)[1]
    assert (block.info, block.text, block.line) == ("sh run", "[no](link)\n", 5)


def test_outputs_are_compared_with_gaps() -> None:
    assert matches("a ... c\n...\nend\n", "a b c\nx\ny\nend\n")
    assert matches("...\nend\n", "end  \n")
    assert not matches("a\n", "a\nb\n")
    assert not matches("a.c\n", "abc\n")
