"""Input and output of a sender: plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from foveal_runtime.mirror.messages import Death, EngineHeartbeat, RequestId, Up, Welcome
from foveal_runtime.mirror.store import Buffer
from foveal_runtime.plan.media import MMHash


class SendItem(NamedTuple):
    """One distinct item of a request. `source`: frontend or injector to ask first when missing."""

    mm_hash: MMHash
    size_bytes: int
    source: str | None = None


class SendValue(NamedTuple):
    """A serialised value to send: inline `data`, or the name of a shared-memory file with it.

    `digest` is the 8-byte BLAKE3 of the bytes (`wire.codec.digest`).
    """

    data: Buffer
    digest: bytes
    shared_name: str = ""


class Sending(NamedTuple):
    """A message and the value frames that follow it, in frame order."""

    message: Up
    frames: list[Buffer]


@dataclass(slots=True)
class DownEvent:
    """What a message from the engine means for the request layer, in the order to act on it.

    Attributes:
        session_over: why the session ended, "" when it goes on. `lost`: unfinished requests to
            issue again (a new attempt number, here or elsewhere).
        welcome: the session is open.
        needs: hashes to answer, each exactly once, with fill() or nofill(). Answer inline: a need
            may mean that a shared file could not be opened.
        rejected: (rid, code) of requests that failed; they are finished.
        outputs: opaque here; act on it after the above.
        heartbeat: the engine is alive (and how far).
        death: how a life of this engine ended. `has_refusals`: the book of refusals has grown.
    """

    session_over: str = ""
    lost: list[RequestId] = field(default_factory=list)
    welcome: Welcome | None = None
    needs: list[MMHash] = field(default_factory=list)
    rejected: list[tuple[RequestId, str]] = field(default_factory=list)
    outputs: msgspec.Raw | None = None
    heartbeat: EngineHeartbeat | None = None
    death: Death | None = None
    has_refusals: bool = False
