"""Values that requests give up before they end (`caches.unpin_at` = "encoded"), and their way back.

Used by `core`. Once an item is encoded or computed its value is unpinned and its memory may go; a
request that is preempted afterwards leaves the scheduler, queues for its values again holding
none, and comes back with them. A stored value that has changed since it was checked on arrival is
asked for again in the same way, and nothing made from a wrong one is used again. Never touches the
model.
"""

from __future__ import annotations

import logging

from foveal_runtime.engine.scheduler.scheduler import Scheduler
from foveal_runtime.engine.types.request import Request
from foveal_runtime.engine.types.step import StepPlan
from foveal_runtime.mirror.receiver import ReadyRequest, Receiver
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire import codec

_LOG = logging.getLogger(__name__)


class ValueRelease:
    """Releases values of encoded items and asks for them again."""

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

    def refetch(self, ready: ReadyRequest) -> bool:
        """Whether a stored value is damaged: then the request waits for others."""
        damaged = self._damaged(ready)
        if not damaged:
            return False
        _LOG.error("%d stored values no longer have their digest: asked for again", len(damaged))
        self._receiver.refetch(ready.fid, ready.rid, damaged)
        self._forget(damaged)
        return True

    def take_ready(self) -> list[ReadyRequest]:
        """Requests to start now. What was made from replaced values, and from those that their last
        user has given up, is forgotten before anybody starts who has the right ones."""
        while replaced := self._receiver.take_replaced():
            _LOG.warning("%d stored values were wrong or replaced", len(replaced))
            self._forget(replaced)
        return self._receiver.take_ready()

    def has_wrong(self, request: Request) -> bool:
        """Whether a value of a request that the scheduler does not have was found to be wrong."""
        found = (self._receiver.store.pinned.get(entry.mm_hash) for entry in request.mm_inputs)
        return any(entry is not None and entry.wrong for entry in found)

    def _forget(self, wrong: list[MMHash]) -> None:
        """Whoever needs the right values does not wait for the users of the wrong ones to end."""
        self._scheduler.forget_media(wrong)
        for request, mm_hash in self._scheduler.part_with(wrong):
            self._receiver.release_value(request.session, request.rid, mm_hash)
        self.recall()

    def _damaged(self, ready: ReadyRequest) -> list[MMHash]:
        """Of the values that the encoder would read. What came with the request was just checked,
        and so was all of it when nothing was here before; a copy of what was here is not read."""
        if not ready.joined:
            return []
        lookup = self._scheduler.encoder.lookup
        return [
            mm_hash for mm_hash, value in ready.items.items()
            if value.digest and lookup(mm_hash) == "absent"
            and codec.digest(value.data) != value.digest
        ]  # fmt: skip
