"""Values that requests give up before they end (`caches.unpin_at` = "encoded"), and their way back.

Used by `core`. Once an item is encoded or computed its value is unpinned and its memory may go; a
request that is preempted afterwards leaves the scheduler, queues for its values again holding
none, and comes back with them. Off, it does nothing. Never touches the model.
"""

from __future__ import annotations

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.step import StepPlan
from foveal_runtime.mirror.receiver import ReadyRequest, Receiver


class ValueRelease:
    """See the module."""

    def __init__(self, scheduler: Scheduler, receiver: Receiver, *, is_on: bool) -> None:
        self._scheduler = scheduler
        self._receiver = receiver
        self._is_on = is_on

    def after_step(self, plan: StepPlan) -> None:
        """Unpins what the step has secured."""
        if not self._is_on:
            return
        for entry in plan.scheduled:
            request = self._scheduler.get(entry.request_id)
            if request is None or request.num_released == len(request.mm_inputs):
                continue
            for mm_hash in self._scheduler.release_secured(request):
                self._receiver.release_value(request.session, request.rid, mm_hash)

    def recall(self) -> bool:
        """Queues requests that were preempted without their values; True when there were any
        (the receiver may have given some of them up)."""
        recalled = self._scheduler.take_recalled()
        for request in recalled:
            self._receiver.requeue(request.session, request.rid)
        return bool(recalled)

    def resume(self, request_id: str, ready: ReadyRequest) -> None:
        """The values of a request that is away have come back."""
        views = {mm_hash: memoryview(value.data) for mm_hash, value in ready.items.items()}
        self._scheduler.resume(request_id, views)
