"""The faults there are: what a proxy may do to a call or to a watch event."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from tests.support.api_server.calls import Call
from tests.support.api_server.fault_proxy import Answer, Event, EventFault, Fault, Forward

When = Callable[[Call], bool]
Pid = Callable[[], int]


def any_write(call: Call) -> bool:
    """Writes that count: all but those to Leases."""
    return call.write_number > 0


def write_number(number: int) -> When:
    return lambda call: call.write_number == number


class OncePerWrite:
    """True for the first write of each object by each verb, until it is cleared. Leases and Events
    do not count."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def clear(self) -> None:
        self._seen.clear()

    def __call__(self, call: Call) -> bool:
        if not any_write(call) or call.target.resource == "events":
            return False
        point = (call.verb, str(call.target))
        is_new = point not in self._seen
        self._seen.add(point)
        return is_new


class OncePerEvent:
    """True for the first event of each object and type."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, ...]] = set()

    def __call__(self, call: Call, event: Event) -> bool:
        if event["type"] not in ("ADDED", "MODIFIED", "DELETED"):
            return False
        point = (call.target.resource, event["object"]["metadata"]["name"], event["type"])
        is_new = point not in self.seen
        self.seen.add(point)
        return is_new


def status_answer(status: int, reason: str, retry_after_seconds: int | None = None) -> Answer:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    body |= {"reason": reason, "message": f"a test's {reason}"}
    headers = {"Content-Type": "application/json"}
    if retry_after_seconds is not None:
        headers["Retry-After"] = str(retry_after_seconds)
    return Answer(status, json.dumps(body).encode(), headers)


REFUSALS = {
    409: status_answer(409, "Conflict"),
    429: status_answer(429, "TooManyRequests", 1),
    500: status_answer(500, "InternalError"),
    503: status_answer(503, "ServiceUnavailable"),
}


def refuse(when: When, status: int, times: int | None = 1) -> Fault:
    """Answered without the API server ever seeing it."""

    async def act(call: Call, forward: Forward) -> Answer:
        return REFUSALS.get(status) or status_answer(status, "Refused")

    return Fault(when, act, times)


def lose_answer(when: When, times: int | None = 1) -> Fault:
    """Timeout after commit: the API server did it, the client learns that something broke."""

    async def act(call: Call, forward: Forward) -> Answer:
        await forward()
        return status_answer(504, "Timeout")

    return Fault(when, act, times)


def delay(when: When, seconds: float) -> Fault:
    async def act(call: Call, forward: Forward) -> Answer:
        await asyncio.sleep(seconds)
        return await forward()

    return Fault(when, act, 1)


def black_hole(when: When) -> Fault:
    """No answer at all, until the client gives up."""

    async def act(call: Call, forward: Forward) -> Answer:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    return Fault(when, act, None)


def kill(when: When, pid: Pid, *, after_commit: bool) -> Fault:
    """SIGKILL before the API server sees the call, or after it did and before the answer."""

    async def act(call: Call, forward: Forward) -> Answer:
        if after_commit:
            await forward()
        os.kill(pid(), signal.SIGKILL)
        return status_answer(503, "Killed")

    return Fault(when, act, 1)


def stale_reads(when: When, snapshot: Callable[[Call], dict[str, Any] | None]) -> Fault:
    """Reads answered from the past: `snapshot` gives the old body, None lets a call through."""

    async def act(call: Call, forward: Forward) -> Answer:
        body = snapshot(call)
        if body is None:
            return await forward()
        return Answer(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    return Fault(lambda call: not call.is_write and when(call), act, None)


# --- watch events --------------------------------------------------------------------------------
WhenEvent = Callable[[Call, Event], bool]


def of_resource(resource: str, *types: str) -> WhenEvent:
    """Events of a resource, of the given types (ADDED, MODIFIED, DELETED) or of all."""
    kinds = types or ("ADDED", "MODIFIED", "DELETED")
    return lambda call, event: call.target.resource == resource and event["type"] in kinds


def drop_events(when: WhenEvent, times: int | None = 1) -> EventFault:
    return EventFault(when, lambda event: [], times)


def duplicate_events(when: WhenEvent, times: int | None = 1) -> EventFault:
    return EventFault(when, lambda event: [event, event], times)


def cut_watch(when: WhenEvent, times: int | None = 1) -> EventFault:
    """The stream ends without a word, the event is lost with it."""
    return EventFault(when, lambda event: None, times)


def expire_watch(when: WhenEvent, times: int | None = 1) -> EventFault:
    """410 Gone instead of the event: the client has to list anew."""
    gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 410}
    gone |= {"reason": "Expired", "message": "a test's expiry"}
    return EventFault(when, lambda event: [{"type": "ERROR", "object": gone}], times)
