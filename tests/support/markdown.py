"""What the documentation's checks read of a Markdown page: links, headings, code blocks. Pure.

A block whose info string is `sh run` is run by the tests, `sh run slow` only with the slow ones
(`make docs` runs both), `sh cluster` on the node of `make cluster`. A `text output` block right
after it is what it must print: a line of `...` stands for any lines, `...` inside a line for any
text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( {0,3})(`{3,}|~{3,})([^`]*)$")
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)")


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A fenced block; `line` is that of its fence."""

    info: str
    text: str
    line: int


class Runnable(msgspec.Struct, frozen=True, kw_only=True):
    """`output` is None where nothing is said about it."""

    where: str
    script: str
    is_slow: bool
    output: str | None


def pages() -> list[Path]:
    """Every Markdown page that is ours."""
    found = [*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")]
    for folder in ("docs", "examples", "e2e", "charts", "operator", "runtime", "tests"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(path for path in found if ".venv" not in path.parts)


def split(text: str) -> tuple[str, list[Block]]:
    """The text without code blocks (their lines are empty), and the blocks."""
    prose: list[str] = []
    blocks: list[Block] = []
    fence, info, start, indent, inside = "", "", 0, 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        found = _FENCE.match(line)
        if fence:
            closes = found and found[2].startswith(fence) and not found[3].strip()
            if closes:
                blocks.append(Block(info=info, text="\n".join(inside) + "\n", line=start))
                fence = ""
            else:
                inside.append(line[min(indent, len(line) - len(line.lstrip())) :])
            prose.append("")
        elif found:
            fence, info, start, inside = found[2], found[3].strip(), number, []
            indent = len(found[1])
            prose.append("")
        else:
            prose.append(line)
    assert not fence, f"the block that begins in line {start} has no end"
    return "\n".join(prose), blocks


def links(text: str) -> Iterator[tuple[int, str]]:
    """(line, target) of every link outside of code."""
    prose, _ = split(text)
    bare = re.sub(r"`[^`\n]*`", lambda found: " " * len(found[0]), prose)
    for found in _LINK.finditer(prose):
        if bare[found.start()] != " " or prose[found.start()] == " ":
            yield prose.count("\n", 0, found.start()) + 1, found[1]


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    prose, _ = split(text)
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?)(?: +#+)?$", prose, flags=re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names | set(re.findall(r'<a (?:id|name)="([^"]+)"', prose))


def runnables(path: Path, where: str = "run") -> Iterator[Runnable]:
    """The blocks `sh WHERE` of a page, in order."""
    _, blocks = split(path.read_text(encoding="utf-8"))
    for block, after in itertools.zip_longest(blocks, blocks[1:]):
        words = block.info.split()
        if words[:2] == ["sh", where]:
            assert set(words[2:]) <= {"slow"}, f"{path}:{block.line}: {block.info}"
            is_output = after is not None and after.info == "text output"
            yield Runnable(
                where=f"{path.relative_to(ROOT)}:{block.line}",
                script=block.text,
                is_slow="slow" in words,
                output=after.text if after is not None and is_output else None,
            )


def matches(wanted: str, printed: str) -> bool:
    """Whether the output is as the page says; white space at the ends of lines does not count."""
    parts = []
    for line in wanted.rstrip().splitlines():
        if line.strip() == "...":
            parts.append(r"(?:.*\n)*?")
        else:
            pieces = [re.escape(piece) for piece in line.rstrip().split("...")]
            parts.append(".*".join(pieces) + r"[ \t]*\n")
    return re.fullmatch("".join(parts), printed.rstrip() + "\n") is not None
