"""Requests that wait for their turn, in the order of the policy.

Used by `scheduler` only. First come first served, or smaller priority first; a preempted request
returns to its old place. Bounded by the scheduler, which refuses before it pushes.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from foveal_runtime.engine.types.request import Request


class WaitingQueue:
    """First come, first served. `num_tokens` counts the tokens of all that wait."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def push_back(self, request: Request) -> None:
        """Returns a preempted request to its place before all that arrived later."""
        # Victims are taken from the youngest to the oldest, so the front is the right place.
        self.push(request)
        self._requests.move_to_end(request.request_id, last=False)

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens


class PriorityQueue(WaitingQueue):
    """Smaller priority first, then first come."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, str]] = []

    def push(self, request: Request) -> None:
        super().push(request)
        key = (request.priority, request.sequence, request.request_id)
        heapq.heappush(self._heap, key)

    def push_back(self, request: Request) -> None:
        self.push(request)  # its sequence has not changed

    def head(self) -> Request:
        while True:
            request = self._requests.get(self._heap[0][2])
            if request is not None:
                return request
            heapq.heappop(self._heap)

    def remove(self, request: Request) -> None:
        super().remove(request)
        if len(self._heap) > 4 * len(self._requests) + 64:
            self._heap = [item for item in self._heap if item[2] in self._requests]
            heapq.heapify(self._heap)
        elif self._heap[0][2] == request.request_id:
            heapq.heappop(self._heap)
