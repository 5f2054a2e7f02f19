"""The seam between messages and transports: what every transport offers.

Implemented by `zmq_transport` (between processes) and `inprocess` (tests, simulation). A transport
moves lists of frames and counts bytes; it knows no message. It never blocks a sender: what cannot
be sent now ends the session, which is cheap, while waiting would stall every session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from foveal_runtime.mirror.store import Buffer

Frames = list[memoryview]


class LinkDown(Exception):
    """The link cannot carry messages now: end the session, open another when it is back.

    Attributes:
        reason: disconnected, full, unreachable, handshake_failed or closed (a metric label).
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class ByteCounters:
    """Application bytes of all frames (routing ids, ZMTP and CURVE overhead not counted)."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    def count_sent(self, frames: Sequence[Buffer]) -> None:
        self.messages_sent += 1
        self.bytes_sent += sum(len(frame) for frame in frames)

    def count_received(self, frames: Sequence[Buffer]) -> None:
        self.messages_received += 1
        self.bytes_received += sum(len(frame) for frame in frames)


class FrontendTransport(Protocol):
    """One link of a frontend to an engine. Used in one asyncio loop."""

    counters: ByteCounters

    async def connected(self) -> None:
        """Returns when messages can be sent. Wait for it before each HELLO."""
        ...

    def send(self, frames: Sequence[Buffer]) -> None:
        """Hands the message over at once, in order. Raises LinkDown. Buffers must not change
        afterwards."""
        ...

    async def recv(self) -> Frames:
        """The next message. Raises LinkDown, once per break."""
        ...

    def close(self) -> None: ...


class EngineTransport(Protocol):
    """All links of an engine. Used by one thread, except `wake`."""

    counters: ByteCounters
    endpoint: str

    def poll(self, timeout_seconds: float) -> list[tuple[str, Frames]]:
        """Waits for messages or a wake-up; returns (frontend id, frames) in order of arrival,
        maybe none."""
        ...

    def send(self, frontend_id: str, frames: Sequence[Buffer]) -> None:
        """Raises LinkDown when that frontend is gone or does not read."""
        ...

    def wake(self) -> None:
        """Makes `poll` return soon; safe from any thread."""
        ...

    def close(self) -> None: ...
