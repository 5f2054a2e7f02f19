"""Devices that the node advertises, as a device plugin would; they are names and numbers only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.node import commands

NAME = "nvidia.com/gpu"


def advertise(count: int) -> None:
    """So many of them, instead of what there was."""
    _patch("add", count)


@contextmanager
def advertised(count: int) -> Iterator[None]:
    advertise(count)
    try:
        yield
    finally:
        _patch("remove", count)


def _patch(operation: str, count: int) -> None:
    key = NAME.replace("/", "~1")
    patches = [
        {"op": operation, "path": f"/status/{kind}/{key}", "value": str(count)}
        for kind in ("capacity", "allocatable")
    ]
    commands.kubectl("patch", "node", "node1", "--subresource=status", "--type=json",
                "-p", json.dumps(patches))  # fmt: skip
