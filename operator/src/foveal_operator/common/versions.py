"""Versions of this project's distributions, and how far apart two of them are supported."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version


def installed_version(distribution: str, otherwise: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return otherwise


def is_too_old(pod: str, operator: str) -> bool:
    """Whether a pod is more than one minor release behind; False where either is no release.
    The minor release before X.0 is not known: the one before counts as any of the X before."""
    found = [re.match(r"(\d+)\.(\d+)", text) for text in (pod, operator)]
    if not all(found):
        return False
    (old_major, old), (major, minor) = (tuple(map(int, m.groups())) for m in found if m)
    if old_major == major:
        return minor - old > 1
    return old_major < major and (major - old_major > 1 or minor > 0)
