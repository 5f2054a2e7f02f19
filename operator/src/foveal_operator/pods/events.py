"""Reasons of waiting pods from their Events, which alone report a volume that cannot be mounted.

Wraps the probing of pods (probes.py) for the operator. Reads Events of pods that have reported no
reason for some seconds, a few at a time. Never an error: what cannot be read is
unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError
from foveal_operator.kube.kinds import EVENT
from foveal_operator.kube.types import Obj
from foveal_operator.pods.probes import PodReports

PATIENCE_SECONDS = 5.0
INTERVAL_SECONDS = 20.0
MAX_PODS = 8
MAX_TEXT = 512
_MOUNT = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_SILENT = frozenset({"ContainerCreating", "PodInitializing"})


class _Known(msgspec.Struct):
    """One silent pod: since when, and what its Events said when asked last."""

    since: float
    asked_at: float = float("-inf")
    text: str = ""


class PodEvents:
    """Args: clock: monotonic seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def add_to(self, reports: PodReports, *pods: Sequence[Obj]) -> PodReports:
        """The reports with `waits` of those pods that wait for a volume."""
        flat = [pod for some in pods for pod in some]
        silent = [pod for pod in flat if is_silent(pod)]
        for uid in {_uid(pod) for pod in flat} - {_uid(pod) for pod in silent}:
            self._known.pop(uid, None)
        for pod in silent[:MAX_PODS]:
            await self._ask(pod)
        waits = {
            pod["metadata"]["name"]: known.text
            for pod in silent
            if (known := self._known.get(_uid(pod))) and known.text
        }
        return msgspec.structs.replace(reports, waits=waits)

    def forget(self, keep_uids: Iterable[str]) -> None:
        """Drops what is kept of all pods but these; call it after a full listing."""
        kept = set(keep_uids)
        self._known = {uid: known for uid, known in self._known.items() if uid in kept}

    async def _ask(self, pod: Obj) -> None:
        now = self._clock()
        known = self._known.setdefault(_uid(pod), _Known(since=now))
        if now - known.since < PATIENCE_SECONDS or now - known.asked_at < INTERVAL_SECONDS:
            return
        known.asked_at = now
        fields = f"regarding.uid={_uid(pod)},type=Warning"
        try:
            events = await self._cluster.list_all(
                EVENT, pod["metadata"]["namespace"], fields=fields
            )
        except ApiError:
            return
        known.text = latest_mount_failure(events)


def is_silent(pod: Obj) -> bool:
    """On a node, and no container has begun or said why not."""
    status = pod.get("status", {})
    if pod["metadata"].get("deletionTimestamp") or status.get("phase") != "Pending":
        return False
    if not pod.get("spec", {}).get("nodeName") or not _uid(pod):
        return False
    containers = [*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())]
    causes = [c.get("state", {}).get("waiting", {}).get("reason") for c in containers]
    return all(cause in _SILENT for cause in causes)


def latest_mount_failure(events: Iterable[Obj]) -> str:
    """The kubelet's words of the latest failed mount; "" when none failed."""
    found = [event for event in events if event.get("reason") in _MOUNT]
    return str(max(found, key=_time)["note"])[:MAX_TEXT] if found else ""


def _time(event: Obj) -> str:
    series = event.get("series") or {}
    return str(
        series.get("lastObservedTime")
        or event.get("deprecatedLastTimestamp")
        or event.get("eventTime")
        or ""
    )


def _uid(pod: Obj) -> str:
    return str(pod["metadata"].get("uid", ""))
