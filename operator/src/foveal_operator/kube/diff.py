"""Differences that applying an object would make: by field, and whether pods restart. Pure.

Called by the reconciler (is an apply needed, what drifted) and by `foveal plan --server`. Compares
only what the operator writes: fields of other managers in the live object are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from foveal_operator.kube.types import Obj
from foveal_runtime.plan import quantity

_QUANTITY = re.compile(r"(^|\.)((limits|requests)\.[^\[\]]+|sizeLimit|storage)$")
"""Paths of quantities; a resource's name may have dots of its own (nvidia.com/gpu)."""
_TEXTS = frozenset({"annotations", "labels", "matchLabels", "nodeSelector"})
"""Maps of texts: the API server keeps empty ones."""
_TRUE_IF_ABSENT = "automountServiceAccountToken"
_MISSING = object()


class Change(msgspec.Struct, frozen=True):
    """One field; `before` is None where it was not there."""

    path: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.path}: {_short(self.before)} -> {_short(self.after)}{self._in_words()}"

    def _in_words(self) -> str:
        """What a difference of bytes is, which nobody reads off two numbers of ten digits."""
        if not (self.path.endswith("_bytes") and isinstance(self.before, int)):
            return ""
        if not isinstance(self.after, int):
            return ""
        sign = "+" if self.after > self.before else "-"
        return f" ({sign}{quantity.format_gib(abs(self.after - self.before))})"


def _short(value: Any) -> str:
    text = "(none)" if value is None else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def diff(wanted: Obj, live: Obj | None) -> list[Change]:
    """Fields of `wanted` that the live object lacks or has otherwise."""
    if live is None:
        return [Change("", None, f"{wanted['kind']} {wanted['metadata']['name']}")]
    return list(_walk(wanted, live, ""))


def _walk(wanted: Any, live: Any, path: str) -> Iterator[Change]:
    if isinstance(wanted, Mapping) and isinstance(live, Mapping):
        for key, value in wanted.items():
            at = f"{path}.{key}" if path else str(key)
            found = live.get(key, _MISSING)
            if found is _MISSING:
                if not _is_dropped(path, key, value):
                    yield Change(at, None, value)
            else:
                yield from _walk(value, found, at)
    elif isinstance(wanted, list) and isinstance(live, list):
        yield from _lists(wanted, live, path)
    elif not _is_same(wanted, live, path):
        yield Change(path, live, wanted)


def _is_dropped(path: str, key: object, value: Any) -> bool:
    """The API server drops empty values, in pods also zeros and empty texts (`value` of an
    environment variable); wanting one is no change."""
    if value is False:
        return key != _TRUE_IF_ABSENT
    if value in (None, {}, []):
        return True
    is_in_pod = path.startswith("spec.template.") and path.rpartition(".")[2] not in _TEXTS
    return is_in_pod and value in ("", 0)


def _lists(wanted: list[Any], live: list[Any], path: str) -> Iterator[Change]:
    """Named things are matched by name: others may have added some. Other lists are one value."""
    named = all(isinstance(item, Mapping) and "name" in item for item in wanted)
    if named and all(isinstance(item, Mapping) and "name" in item for item in live):
        by_name = {item["name"]: item for item in live}
        for item in wanted:
            at = f"{path}[{item['name']}]"
            if item["name"] in by_name:
                yield from _walk(item, by_name[item["name"]], at)
            else:
                yield Change(at, None, item)
    elif len(wanted) != len(live):
        yield Change(path, live, wanted)
    else:
        for index, (mine, theirs) in enumerate(zip(wanted, live, strict=True)):
            yield from _walk(mine, theirs, f"{path}[{index}]")


def _is_same(wanted: Any, live: Any, path: str) -> bool:
    if wanted == live:
        return True
    if _QUANTITY.search(path):
        texts = (str(wanted), str(live))
        if all(quantity.is_quantity(text) for text in texts):
            return quantity.parse(texts[0]) == quantity.parse(texts[1])
    return False


def restart_reasons(wanted: Obj, live: Obj | None) -> list[Change]:
    """Changes of the pod template: these restart pods; all others do not."""
    if live is None:
        return []
    return [c for c in diff(wanted, live) if c.path.startswith("spec.template")]
