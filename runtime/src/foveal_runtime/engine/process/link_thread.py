"""The thread that owns the engine's socket: frames in and out, heartbeats, dead links.

Started by `server`. Decodes and checks what arrives (digests included) so that the core thread
only sees well-formed messages, and always reads, whatever the core is doing. Knows sessions only
by the ids that pass through; never touches the mirror, the scheduler or the model.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from foveal_runtime.mirror.messages import (
    Bye,
    DownMessage,
    EngineHeartbeat,
    Heartbeat,
    SessionId,
    Up,
    Welcome,
)
from foveal_runtime.mirror.store import Value
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire import codec
from foveal_runtime.wire.transport import EngineTransport, Frames, LinkDown

_LOG = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
SILENT_SECONDS = 60.0
"""A frontend that says nothing for so long may hang: it keeps its session, but not what others
wait for. Its transport answers for a dead event loop, too."""
GOODBYE_SECONDS = 0.2


class CoreInbox(Protocol):
    """Where decoded messages go; safe to call from this thread."""

    def on_message(self, fid: str, message: Up, values: Mapping[MMHash, Value] | None) -> None: ...

    def on_session_lost(self, fid: str, sid: SessionId, reason: str) -> None: ...

    def on_silent(self, fid: str, sid: SessionId) -> None:
        """Nothing was heard for SILENT_SECONDS, though the link stands; told again and again."""
        ...

    def on_failure(self, error: Exception) -> None:
        """The thread has ended: nobody can be heard any more."""
        ...


class LinkThread:
    """The thread that owns an engine's transport.

    Args:
        make_transport: called in the thread, which then owns the transport.
        pulse: (finished steps, whether work is waiting), for heartbeats.
        open_shared: maps a shared-memory value; None = only inline values.
    """

    def __init__(
        self,
        make_transport: Callable[[], EngineTransport],
        inbox: CoreInbox,
        *,
        pulse: Callable[[], tuple[int, bool]],
        clock: Callable[[], float],
        open_shared: codec.SharedOpener | None = None,
    ) -> None:
        self._make_transport = make_transport
        self._inbox = inbox
        self._pulse = pulse
        self._clock = clock
        self._open_shared = open_shared
        self._outbox: deque[tuple[str, DownMessage]] = deque()
        self._links: dict[str, SessionId] = {}
        self._heard: dict[str, float] = {}
        self._told_at: float | None = None
        self._transport: EngineTransport | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine-links", daemon=True)

    # ---- any thread -----------------------------------------------------------------------------

    def start(self) -> str:
        """Opens the transport; returns its endpoint. Raises what opening it raised."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        assert self._transport is not None
        return self._transport.endpoint

    def send(self, fid: str, message: DownMessage) -> None:
        """Queues a message; it goes out at once, whatever the core does next."""
        self._outbox.append((fid, message))
        if self._transport is not None and self._thread.is_alive():
            with contextlib.suppress(OSError):  # it has just ended
                self._transport.wake()

    def stop(self) -> None:
        """Sends what is left and closes the transport."""
        if self._thread.ident is None or not self._thread.is_alive():
            return
        self._stopping = True
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.wake()
        self._thread.join()

    @property
    def bytes_received(self) -> int:
        return self._transport.counters.bytes_received if self._transport is not None else 0

    @property
    def bytes_sent(self) -> int:
        return self._transport.counters.bytes_sent if self._transport is not None else 0

    # ---- this thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._transport = self._make_transport()
        except BaseException as error:
            self._failure = error
            return
        finally:
            self._started.set()
        try:
            self._serve(self._transport)
        except Exception as error:
            _LOG.exception("the link thread failed")
            self._inbox.on_failure(error)
        finally:
            self._transport.close()

    def _serve(self, transport: EngineTransport) -> None:
        beat_at = self._clock()
        while True:
            stopping = self._stopping
            for fid, frames in transport.poll(0.0 if stopping else HEARTBEAT_SECONDS / 2):
                self._on_frames(fid, frames)
            self._send_all(transport)
            if stopping:
                self._let_out(transport)
                return
            now = self._clock()
            if now - beat_at >= HEARTBEAT_SECONDS:
                # A machine that stood still has not read what was said meanwhile.
                self._listen(now, stood_still=now - beat_at > 5 * HEARTBEAT_SECONDS)
                beat_at = now
                self._beat(transport)

    def _listen(self, now: float, *, stood_still: bool) -> None:
        self._heard = {
            fid: now if stood_still else self._heard.get(fid, now) for fid in self._links
        }
        for fid, at in self._heard.items():
            if now - at > SILENT_SECONDS:
                self._inbox.on_silent(fid, self._links[fid])

    def _let_out(self, transport: EngineTransport) -> None:
        """Closing drops what the socket still has; the last goodbyes get a moment to leave."""
        if self._told_at is not None and self._clock() - self._told_at < GOODBYE_SECONDS:
            for _ in range(4):
                transport.poll(GOODBYE_SECONDS / 4)

    def _on_frames(self, fid: str, frames: Frames) -> None:
        self._heard[fid] = self._clock()
        try:
            message = codec.decode_up(frames)
            values = codec.open_values(message, frames, self._open_shared)
        except codec.DecodeError as error:
            _LOG.warning("frontend %r sent a bad message, its session ends: %s", fid, error)
            sid = self._links.get(fid)
            if sid is not None:
                self._inbox.on_session_lost(fid, sid, "bad_message")
                self._outbox.append((fid, Bye(sid, "bad_message")))
            return
        if isinstance(message, Heartbeat) and message.sid == self._links.get(fid):
            return
        self._inbox.on_message(fid, message, values or None)

    def _send_all(self, transport: EngineTransport) -> None:
        while self._outbox:
            fid, message = self._outbox.popleft()
            if isinstance(message, Welcome):
                self._links[fid] = message.sid
            elif isinstance(message, Bye) and message.sid == self._links.get(fid):
                del self._links[fid]
                self._told_at = self._clock()  # perhaps just before `stop`
            self._send_one(transport, fid, message)

    def _send_one(self, transport: EngineTransport, fid: str, message: DownMessage) -> None:
        try:
            transport.send(fid, codec.encode_down(message))
        except LinkDown as error:
            sid = self._links.pop(fid, None)
            if sid is not None:
                _LOG.info("link to frontend %r is down: %s", fid, error.reason)
                self._inbox.on_session_lost(fid, sid, error.reason)

    def _beat(self, transport: EngineTransport) -> None:
        """A frontend that cannot be reached shows here: the transport knows within seconds, from
        heartbeats of its own thread, which a busy event loop does not delay."""
        watermark, busy = self._pulse()
        for fid, sid in list(self._links.items()):
            self._send_one(transport, fid, EngineHeartbeat(sid, watermark, busy))
