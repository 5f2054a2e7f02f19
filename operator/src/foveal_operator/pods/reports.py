"""The last reports of pods, asked for in the background: a pass never waits for a pod.

Between the reconciler and probes.py. A pass gets what is known and starts the asking; news bring
the resource back into the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from foveal_operator.kube.kinds import POD
from foveal_operator.kube.store import owner_of
from foveal_operator.kube.types import NamespacedName, Obj
from foveal_operator.pods.probes import PodReports

ObservePods = Callable[
    [Sequence[Obj], Sequence[Obj], Sequence[Obj], Sequence[Obj]], Awaitable[PodReports]
]
"""(pods of engines, of frontends, of Jobs, workloads that lack pods) -> what they said last."""
MAX_RESOURCES = 10_000


class Reports:
    """Args: enqueue: takes the key of a resource whose pods said something new."""

    def __init__(
        self, observe_pods: ObservePods, enqueue: Callable[[NamespacedName], None]
    ) -> None:
        self._observe_pods = observe_pods
        self._enqueue = enqueue
        self._known: dict[NamespacedName, PodReports] = {}
        self._asking: dict[NamespacedName, asyncio.Task[None]] = {}

    async def observe(
        self,
        engine_pods: Sequence[Obj],
        frontend_pods: Sequence[Obj],
        job_pods: Sequence[Obj] = (),
        short: Sequence[Obj] = (),
    ) -> PodReports:
        """What the pods of one resource said last. Returns at once."""
        pods = [*engine_pods, *frontend_pods, *job_pods, *short]
        key = owner_of(POD, pods[0]) if pods else None
        if key is None:
            return PodReports()
        if key not in self._asking:
            asked = (tuple(engine_pods), tuple(frontend_pods), tuple(job_pods), tuple(short))
            self._asking[key] = asyncio.create_task(self._ask(key, *asked))
        return self._known.get(key, PodReports())

    async def _ask(
        self,
        key: NamespacedName,
        engines: Sequence[Obj],
        frontends: Sequence[Obj],
        jobs: Sequence[Obj],
        short: Sequence[Obj],
    ) -> None:
        try:
            found = await self._observe_pods(engines, frontends, jobs, short)
        finally:
            del self._asking[key]
        if found != self._known.get(key, PodReports()):
            self._known.pop(key, None)
            while len(self._known) >= MAX_RESOURCES:
                del self._known[next(iter(self._known))]
            self._known[key] = found
            self._enqueue(key)

    async def stop(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
