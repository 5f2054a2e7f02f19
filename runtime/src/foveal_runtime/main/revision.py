"""The commit of the model in a directory: written after a fetch, read by the profile.

Also knows the traces that the hub's own tools leave, for models that a user put on a claim by
hand. Never asks a hub.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

SOURCE_FILE = "foveal-source.json"
_COMMIT = re.compile(r"[0-9a-f]{40}")
MAX_REVISION_CHARACTERS = 128


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a directory's files are from.

    Attributes:
        revision: the branch, tag or commit that was asked for.
        resolved: the commit that it stood for; "" when the source has no such thing.
    """

    uri: str
    revision: str = ""
    resolved: str = ""


def write_source(directory: Path, source: Source) -> None:
    text = msgspec.json.format(msgspec.json.encode(source), indent=2)
    (directory / SOURCE_FILE).write_bytes(text + b"\n")


def resolved_revision(directory: Path) -> str:
    """The commit or digest, "" when nothing tells."""
    try:
        data = (directory / SOURCE_FILE).read_bytes()
        return msgspec.json.decode(data, type=Source).resolved[:MAX_REVISION_CHARACTERS]
    except (OSError, msgspec.DecodeError):
        pass
    if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
        return directory.name  # the layout of the hub's cache
    try:
        # `hf download --local-dir` notes the commit in the first line.
        notes = directory / ".cache/huggingface/download/config.json.metadata"
        first = notes.read_text(encoding="utf-8").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return first if _COMMIT.fullmatch(first) else ""
