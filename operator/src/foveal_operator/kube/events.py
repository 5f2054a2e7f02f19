"""Kubernetes Events (events.k8s.io), few of them: one per object and reason in ten minutes.

Used by the reconciler after a condition changed. What repeats within the window only raises the
count of a series. The name of an Event follows from object, reason and window, so a restarted
operator does not write a second one. Events are best effort: a failure is logged, never raised.
"""

from __future__ import annotations

import hashlib
import logging
from datetime import UTC, datetime
from typing import Literal

from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError
from foveal_operator.kube.kinds import EVENT, FIELD_MANAGER
from foveal_operator.kube.types import Obj

log = logging.getLogger(__name__)

WINDOW_SECONDS = 600.0
FLUSH_SECONDS = 60.0
MAX_SERIES = 4096
MAX_NOTE_BYTES = 1000
Type = Literal["Normal", "Warning"]


class _Series:
    """One Event as written, and how often it has happened since."""

    __slots__ = ("body", "count", "flushed", "flushed_count", "started")

    def __init__(self, body: Obj, now: float) -> None:
        self.body = body
        self.started = self.flushed = now
        self.count = self.flushed_count = 1


class EventRecorder:
    """Args: instance: this replica's name, as reportingInstance."""

    def __init__(self, cluster: Cluster, clock: Clock, instance: str) -> None:
        self._cluster = cluster
        self._clock = clock
        self._instance = instance
        self._series: dict[tuple[str, str], _Series] = {}

    async def record(
        self, regarding: Obj, kind: Type, reason: str, note: str, about: str = ""
    ) -> None:
        """Says that something happened to `regarding`, a whole object. Never raises ApiError.
        Events of one reason are one series, unless they are `about` different things."""
        now = self._clock.monotonic()
        key = (regarding["metadata"]["uid"], reason + about)
        known = self._series.get(key)
        try:
            if known is not None and now - known.started < WINDOW_SECONDS:
                known.count += 1
                if now - known.flushed >= FLUSH_SECONDS:
                    await self._flush(known, now)
                return
            if known is not None and known.count > known.flushed_count:
                await self._flush(known, now)
            body = self._body(regarding, kind, reason, note, about)
            self._remember(key, _Series(body, now))
            await self._cluster.create(body)
        except ApiError as error:
            log.warning("event %s: %s", reason, error)

    def forget(self, uid: str) -> None:
        """The object is gone."""
        for key in [key for key in self._series if key[0] == uid]:
            del self._series[key]

    def _remember(self, key: tuple[str, str], series: _Series) -> None:
        self._series.pop(key, None)
        while len(self._series) >= MAX_SERIES:
            del self._series[next(iter(self._series))]
        self._series[key] = series

    async def _flush(self, series: _Series, now: float) -> None:
        series.flushed, series.flushed_count = now, series.count
        counted = {"count": max(2, series.count), "lastObservedTime": self._clock.now_micro()}
        await self._cluster.apply({**series.body, "series": counted})

    def _body(self, regarding: Obj, kind: Type, reason: str, note: str, about: str) -> Obj:
        metadata = regarding["metadata"]
        window = int(_epoch(self._clock.wall()) // WINDOW_SECONDS)
        text = f"{metadata['uid']}/{reason}{about}/{window}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.name,
            "metadata": {
                "name": f"{metadata['name']}.{digest}",
                "namespace": metadata["namespace"],
            },
            "eventTime": self._clock.now_micro(),
            "reportingController": f"foveal.dev/{FIELD_MANAGER}",
            "reportingInstance": self._instance[:128],
            "action": "Reconcile",
            "reason": reason,
            "type": kind,
            "note": note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
            "regarding": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
        }


def _epoch(moment: datetime) -> float:
    return moment.astimezone(UTC).timestamp()
