"""Every error a user or a peer can cause, in one tree.

    FovealError
    ├── ClientError                  the request is wrong (HTTP 4xx)
    │   ├── InvalidRequest           400  invalid_request_error
    │   │   ├── ContextLengthExceeded 400 context_length_exceeded
    │   │   ├── MediaInvalid         400  media_invalid       (cannot be decoded, wrong type)
    │   │   ├── MediaTooLarge        413  media_too_large     (bytes, pixels, seconds, frames)
    │   │   ├── MediaUnknown         400  media_unknown       (uuid-only media not held)
    │   │   ├── Unsupported          400  unsupported_feature (a field that is not served)
    │   │   ├── SchemaInvalid        400  schema_invalid      (no schema, or nothing satisfies it)
    │   │   ├── SchemaUnsupported    400  schema_unsupported  (a keyword that cannot be enforced)
    │   │   ├── SchemaTooLarge       400  schema_too_large
    │   │   ├── SchemaTooSlow        400  schema_too_slow     (to compile)
    │   │   └── GrammarInvalid       400  grammar_invalid     (regex, grammar or structural tag)
    │   ├── MediaForbidden           403  media_forbidden     (host, scheme or path not allowed)
    │   ├── MediaConflict            409  media_conflict      (a uuid rebound to other content)
    │   ├── AuthenticationFailed     401  invalid_api_key
    │   ├── RequestQuarantined       422  request_quarantined (it ended engines before)
    │   ├── UploadTooSlow            408  upload_too_slow
    │   └── NotFound                 404  not_found
    ├── RetryLater                   the service is busy or changing (HTTP 429 / 503 + Retry-After)
    │   ├── RateLimited              429  rate_limit_exceeded
    │   ├── Overloaded               503  overloaded
    │   └── NoEngine                 503  no_engine
    ├── MediaFetchFailed             502→ reported as 424 media_fetch_failed
    ├── EngineFailure                500  engine_error        (one request; the engine lives)
    └── StartupError                 exit code 2 and one line (bad configuration, unsupported model)

Raised by every package for anything that came from a user, a peer process or the cluster; asserts
are for what our own code guarantees. `code` is the wire code, OpenAI's error code and the metric
label.
"""

from __future__ import annotations

import copy
import errno
from typing import ClassVar, Self


class FovealError(Exception):
    """Base of all errors with a name the outside may see.

    Attributes:
        status: HTTP status the frontend answers with.
        code: stable identifier (OpenAI `error.code`, wire code, metric label).
        kind: OpenAI `error.type`.
        param: the request field at fault, when one is.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def about(self, param: str, message: str) -> Self:
        """The same error, about another field; others may wait for this one."""
        other = copy.copy(self)
        other.param, other.message, other.args = param, message, (message,)
        return other


class ClientError(FovealError):
    status = 400
    code = "invalid_request_error"
    kind = "invalid_request_error"


class InvalidRequest(ClientError):
    pass


class ContextLengthExceeded(InvalidRequest):
    """Clients cut a conversation when they know this error, some by its code, others by words:
    "prompt is too long", or OpenAI's "this model's maximum context length is" (litellm)."""

    code = "context_length_exceeded"


class MediaInvalid(InvalidRequest):
    code = "media_invalid"


class MediaTooLarge(InvalidRequest):
    status = 413
    code = "media_too_large"


class MediaUnknown(InvalidRequest):
    code = "media_unknown"


class Unsupported(InvalidRequest):
    code = "unsupported_feature"


class SchemaInvalid(InvalidRequest):
    code = "schema_invalid"


class SchemaUnsupported(InvalidRequest):
    code = "schema_unsupported"


class SchemaTooLarge(InvalidRequest):
    code = "schema_too_large"


class SchemaTooSlow(InvalidRequest):
    code = "schema_too_slow"


class GrammarInvalid(InvalidRequest):
    code = "grammar_invalid"


class MediaForbidden(ClientError):
    status = 403
    code = "media_forbidden"
    kind = "permission_error"


class MediaConflict(ClientError):
    status = 409
    code = "media_conflict"


class AuthenticationFailed(ClientError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class NotFound(ClientError):
    status = 404
    code = "not_found"
    kind = "not_found_error"


class RequestQuarantined(ClientError):
    status = 422
    code = "request_quarantined"


class UploadTooSlow(ClientError):
    status = 408
    code = "upload_too_slow"


class RetryLater(FovealError):
    """The request was fine; try again after `retry_after_seconds`."""

    status = 503
    code = "overloaded"
    kind = "overloaded_error"

    def __init__(
        self, message: str, *, retry_after_seconds: int = 1, param: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_seconds = retry_after_seconds


class RateLimited(RetryLater):
    status = 429
    code = "rate_limit_exceeded"
    kind = "rate_limit_error"


class Overloaded(RetryLater):
    pass


class NoEngine(RetryLater):
    code = "no_engine"


class MediaFetchFailed(FovealError):
    status = 424
    code = "media_fetch_failed"
    kind = "media_error"


class EngineFailure(FovealError):
    code = "engine_error"


class StartupError(FovealError):
    """A process cannot start: printed as one line, exit code 2."""

    code = "startup_error"


def _leaves(root: type[FovealError]) -> dict[str, type[FovealError]]:
    found: dict[str, type[FovealError]] = {}
    for sub in root.__subclasses__():
        found.setdefault(sub.code, sub)
        for code, leaf in _leaves(sub).items():
            found.setdefault(code, leaf)
    return found


_RAISED: dict[str, type[FovealError]] = {FovealError.code: FovealError, **_leaves(FovealError)}
SERVER_FAULTS = tuple(
    sorted(
        code for code, leaf in _RAISED.items() if leaf.status >= 500 and leaf is not StartupError
    )
)
"""Codes of requests that the server failed, before its answer began or in the middle of it."""


def from_wire(code: str, message: str) -> FovealError:
    """The error for a wire code, as an engine reports it; an unknown code is an EngineFailure."""
    return _leaves(FovealError).get(code, EngineFailure)(message)


def file_problem(error: OSError) -> str:
    """What is said of a file or a disk that fails, in one line; "" for other failures."""
    if error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if is_full or "temporary directory" in str(error.strerror):
        return f"{error.strerror}: free some, or name a directory on another disk (or in TMPDIR)"
    return ""
