"""Reasons from Events: why a pod's volume cannot be mounted, and why a workload gets no pods.

No field of a pod, a StatefulSet or a Job says either. Wraps the probing of pods (probes.py) for the
operator. Reads Events of what has been silent for some seconds, a few at a time. Never an error:
what cannot be read is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError
from foveal_operator.kube.kinds import EVENT
from foveal_operator.kube.types import Obj
from foveal_operator.pods.probes import PodProber, PodReports

PATIENCE_SECONDS = 5.0
INTERVAL_SECONDS = 20.0
CREATE_PATIENCE_SECONDS = 2.0
CREATE_INTERVAL_SECONDS = 3.0
"""Between two questions about a workload without pods, for its first EAGER_SECONDS."""
EAGER_SECONDS = 60.0
FORGET_SECONDS = 400.0
"""Longer than any pause between two passes, so that a reason that holds stays told."""
MAX_PODS = 8
MAX_TEXT = 512
_MOUNT = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_CREATE = frozenset({"FailedCreate"})
_SILENT = frozenset({"ContainerCreating", "PodInitializing"})


class _Known(msgspec.Struct):
    """One silent object: since when, and what its Events said when asked last."""

    since: float
    seen_at: float
    asked_at: float = float("-inf")
    text: str = ""


class PodEvents:
    """Args: clock: monotonic seconds."""

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self._cluster = cluster
        self._clock = clock
        self._known: dict[str, _Known] = {}

    async def add_to(
        self, reports: PodReports, pods: Sequence[Obj], short: Sequence[Obj] = ()
    ) -> PodReports:
        """The reports with `waits` of pods that wait for a volume, and `refused` of workloads whose
        pods cannot be created.

        Args:
            short: workloads that lack pods.
        """
        silent = [pod for pod in pods if is_silent(pod)]
        for uid in {_uid(pod) for pod in pods} - {_uid(pod) for pod in silent}:
            self._known.pop(uid, None)
        for pod in silent[:MAX_PODS]:
            await self._ask(pod, _MOUNT, PATIENCE_SECONDS, INTERVAL_SECONDS)
        for workload in short:
            await self._ask(workload, _CREATE, CREATE_PATIENCE_SECONDS, CREATE_INTERVAL_SECONDS)
        refused = {f"{body['kind']}/{name}": text for body, name, text in self._told(short)}
        waits = {name: text for _, name, text in self._told(silent)}
        return msgspec.structs.replace(reports, waits=waits, refused=refused)

    def _told(self, objects: Iterable[Obj]) -> Iterator[tuple[Obj, str, str]]:
        for body in objects:
            known = self._known.get(_uid(body))
            if known and known.text:
                yield body, body["metadata"]["name"], known.text

    def forget(self, keep_uids: Iterable[str]) -> None:
        """Drops what is kept of all objects but these; call it after a full listing."""
        kept = set(keep_uids)
        self._known = {uid: known for uid, known in self._known.items() if uid in kept}

    async def _ask(
        self, body: Obj, causes: frozenset[str], patience_seconds: float, interval_seconds: float
    ) -> None:
        now = self._clock()
        known = self._known.get(_uid(body))
        if known is None or now - known.seen_at > FORGET_SECONDS:
            known = self._known[_uid(body)] = _Known(since=now, seen_at=now)
        known.seen_at = now
        if now - known.since > EAGER_SECONDS:
            interval_seconds = INTERVAL_SECONDS
        if now - known.since < patience_seconds or now - known.asked_at < interval_seconds:
            return
        known.asked_at = now
        fields = f"regarding.uid={_uid(body)},type=Warning"
        try:
            events = await self._cluster.list_all(
                EVENT, body["metadata"]["namespace"], fields=fields
            )
        except ApiError:
            return
        known.text = latest_failure(events, causes)


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


def latest_failure(events: Iterable[Obj], causes: frozenset[str]) -> str:
    """The words of the latest Event with one of these reasons; "" without one. Anybody may write an
    Event, also one without words."""
    found = [event for event in events if event.get("reason") in causes and event.get("note")]
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


class PodAsker:
    """What the pods say of themselves, and what Events say of those that cannot."""

    def __init__(self, prober: PodProber, events: PodEvents) -> None:
        self._prober = prober
        self._events = events

    async def ask(
        self,
        engines: Sequence[Obj],
        frontends: Sequence[Obj],
        jobs: Sequence[Obj],
        short: Sequence[Obj],
    ) -> PodReports:
        found = await self._prober.observe_pods(engines, frontends, jobs)
        return await self._events.add_to(found, [*engines, *frontends, *jobs], short)

    def forget(self, keep_uids: Iterable[str]) -> None:
        kept = set(keep_uids)
        self._prober.forget(kept)
        self._events.forget(kept)
