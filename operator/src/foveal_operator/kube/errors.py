"""Errors of API calls, as types that say what to do next. Pure.

Raised by cluster.py and testing/fake_cluster.py, handled by the reconciler, lease.py and
watches.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason

MAX_MESSAGE = 1024
# Answers that the API server gives to a malformed server-side apply, as HTTP 500.
_DENIALS = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (r'is forbidden: User "', reasons.MISSING_RIGHT),
        (r"is forbidden: cannot set (blockOwnerDeletion|an ownerRef)", reasons.MISSING_RIGHT),
        (r"is forbidden: (violates PodSecurity|unable to validate against any security context "
         r"constraint)", reasons.POD_SECURITY),
        (r"is forbidden: (exceeded|failed) quota|is forbidden: \[?(max|min)imum \S+ usage per |"
         r"is forbidden: status unknown for quota|"
         # The limit is a LimitRange's default: the operator gives none below what it asks for.
         r"is invalid: .*must be less than or equal to \S+ limit of", reasons.QUOTA_EXCEEDED),
        (r"is forbidden: no PriorityClass with name", reasons.PRIORITY_CLASS_MISSING),
        (r"is forbidden: error looking up service account", reasons.SERVICE_ACCOUNT_MISSING),
        (r'admission webhook "[^"]*" denied the request|failed calling webhook "|'
         r"ValidatingAdmissionPolicy '", reasons.ADMISSION_DENIED),
    )
)  # fmt: skip
_TYPED_PATCH = ("failed to create typed patch object", "failed to convert", "duplicate entries")


class ApiError(Exception):
    """An API call failed. `status` is 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        self.message = message[:MAX_MESSAGE]
        self.status = status
        super().__init__(f"{status}: {self.message}" if status else self.message)


class Transient(ApiError):
    """It may work later: 429, 5xx, no connection, time-out, a list whose next page has expired
    (410), a quota that others write to at the same time. `retry_after` in seconds, or 0."""

    def __init__(self, message: str, status: int = 0, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message, status)
        self.retry_after_seconds = retry_after_seconds


class Conflict(ApiError):
    """Somebody was faster, or a precondition does not hold: look again, at once."""


class NotFound(ApiError):
    """The object or its API is not there."""


class Forbidden(ApiError):
    """The operator's Role does not allow it."""


class UserError(ApiError):
    """The object is wrong, and stays wrong until the resource changes."""


class Denied(UserError):
    """Admission refuses the object; `reason` tells which part of it."""

    def __init__(self, message: str, status: int, reason: Reason) -> None:
        super().__init__(message, status)
        self.reason = reason


class NotLeader(ApiError):
    """This replica may not write: its lease has run out."""


def classify(status: int, body: Mapping[str, Any], retry_after: str = "") -> ApiError:
    """The error that an answer stands for.

    Args:
        body: the Status object of the answer, {} when it had none.
        retry_after: the answer's Retry-After header.
    """
    message = str(body.get("message") or body.get("reason") or f"HTTP {status}")
    details = body.get("details")
    details = details if isinstance(details, Mapping) else {}
    if status == 409 and details.get("kind") == "resourcequotas":
        # Says nothing of the object, which could not be counted: as Conflict it would be there.
        return Transient(message, status)
    if status == 409 or (status == 422 and _is_of_another_uid(details)):
        return Conflict(message, status)
    if status == 404:
        return NotFound(message, status)
    if status in (401, 403):
        # Admission says 403 as authorization does, in a Status with the same reason.
        reason = denial(message)
        is_unknown = reason is reasons.FAILED_CREATE and body.get("reason") != "Forbidden"
        if is_unknown or reason is reasons.MISSING_RIGHT:
            return Forbidden(message, status)
        return Denied(message, status, reason)
    if status == 500 and any(text in message for text in _TYPED_PATCH):
        return UserError(message, status)
    if status in (408, 410, 429) or status >= 500:
        return Transient(message, status, _seconds(retry_after, details))
    reason = denial(message)
    if reason is not reasons.FAILED_CREATE:
        return Denied(message, status, reason)
    return UserError(message, status)


def denial(message: str) -> Reason:
    """What refused an object, by the API server's own words, in an answer or in what a controller
    repeats of it. FAILED_CREATE for words that are not known."""
    found = [(match.start(), reason) for at, reason in _DENIALS if (match := at.search(message))]
    # The server's words stand before those of a webhook, which can say anything.
    return min(found, key=lambda one: one[0])[1] if found else reasons.FAILED_CREATE


def _is_of_another_uid(details: Mapping[str, Any]) -> bool:
    """An apply named a uid, and another object has the name now: a precondition in effect."""
    causes = details.get("causes") or ()
    return any(cause.get("field") == "metadata.uid" for cause in causes)


def _seconds(header: str, details: Mapping[str, Any]) -> float:
    """How long the server asks to wait, at most five minutes."""
    given = header or details.get("retryAfterSeconds")
    try:
        return max(0.0, min(300.0, float(given or 0)))
    except ValueError:
        return 0.0
