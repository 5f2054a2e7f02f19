"""Declarations of metrics, and the bucket layouts that several share.

Used by vllm.py and foveal.py (the declarations) and by telemetry/. No client
library here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

Kind = Literal["counter", "gauge", "histogram"]
Role = Literal["frontend", "engine", "operator"]


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One family. Counter names carry no `_total` here; the exposition adds it.

    `known` are label values that will come sooner or later: (label, values). Where they are known
    for all labels, the series begin at zero, so that the first increase is seen as one.
    `is_traced`: a histogram whose buckets show the newest traced request as an exemplar.
    """

    name: str
    kind: Kind
    help: str
    roles: tuple[Role, ...]
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_traced: bool = False

    def first_series(self, fixed: Iterable[str] = ()) -> list[dict[str, str]]:
        """Labels, besides `fixed` ones, of the counters and histograms that begin at zero."""
        known = dict(self.known)
        open_labels = [label for label in self.labels if label not in set(fixed)]
        if self.kind == "gauge" or not known.keys() >= set(open_labels):
            return []
        values = itertools.product(*(known[label] for label in open_labels))
        return [dict(zip(open_labels, each, strict=True)) for each in values]


def family(prefix: str, common: tuple[str, ...]) -> Callable[..., Metric]:
    """Declares metrics as (roles, kind, name, help, *labels, **fields), their names with `prefix`
    and their labels behind the `common` ones."""

    def declare(
        roles: tuple[Role, ...], kind: Kind, name: str, text: str, *labels: str, **fields: Any
    ) -> Metric:
        labels = (*common, *labels)
        return Metric(
            name=prefix + name, kind=kind, help=text, roles=roles, labels=labels, **fields
        )

    return declare


TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
ITERATION_BUCKETS = (
    1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
)  # fmt: skip
STAGE_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
    5.0, 10.0,
)  # fmt: skip
AGE_BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
BYTE_BUCKETS = tuple(float(4**e) for e in range(5, 16))
