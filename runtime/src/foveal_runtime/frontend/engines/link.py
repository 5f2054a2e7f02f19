"""One frontend's link to one engine: sessions, heartbeats, requests under way, NEED and FILL.

Owned by `client`. Runs in the HTTP process's event loop; wraps `mirror.sender` (what to say)
and a `wire.transport` (how). A session ends on a gap, a BYE, three silent seconds or a send that
would block; its unfinished requests are then reported lost, and a new session is opened with
backoff. Never decides where a request goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from foveal_runtime.frontend.engines.run import INCOMPATIBLE, Lost, Rejected, Stream
from foveal_runtime.frontend.engines.shared_values import SharedValues
from foveal_runtime.frontend.items.prepared import PreparedItem, PreparedRequest
from foveal_runtime.mirror.messages import (
    Control,
    Death,
    EngineHeartbeat,
    ItemRef,
    RequestId,
    SharedValue,
)
from foveal_runtime.mirror.sender import DownEvent, Sender, Sending, SendItem, SendValue
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.media import MMHash
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import EngineInfo, EngineLoad, LoraReport, RequestBody
from foveal_runtime.wire.transport import FrontendTransport, LinkDown

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
DEAD_AFTER_SECONDS = 3.0
PING_SECONDS = 1.0
MIN_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.05, 5.0
STALL_SECONDS = 60.0


class EngineLink:
    """The session with one engine.

    Attributes:
        info: the engine's facts, None while no session is open.
        name: the engine's own; the endpoint until it has said it. A metric label: it stays.
        boot: changes with every start of the engine; kept while no session is open.
        inflight: requests of ours at this engine; `load` its last report. loras: its adapters.
    """

    def __init__(
        self,
        endpoint: str,
        sender: Sender,
        open_transport: Callable[[str], FrontendTransport],
        *,
        on_change: Callable[[EngineLink], None] = lambda link: None,
        on_death: Callable[[EngineLink, int, Death | None], None] = lambda link, boot, death: None,
        on_refusals: Callable[[], None] = lambda: None,
        shared: SharedValues | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.sender = sender
        self.info: EngineInfo | None = None
        self.is_leaving = False
        self.boot = 0
        self.name = endpoint
        self.load: EngineLoad | None = None
        self.loras = LoraReport(())
        self.own_at_report = 0
        self.heard_at = 0.0
        self.last_end = ""
        self._pulse: EngineHeartbeat | None = None
        self._moved_at = 0.0
        self._opened_at = 0.0
        self._streams: dict[RequestId, Stream] = {}
        self._emptied = asyncio.Event()
        self._fills: set[asyncio.Task[None]] = set()
        self._echoes: dict[int, asyncio.Future[bool]] = {}  # pings by message number
        self._open = open_transport
        self._transport: FrontendTransport | None = None
        self._reader: asyncio.Task[None] | None = None
        self._on_change = on_change
        self._on_death = on_death
        self._on_refusals = on_refusals
        self._shared = shared
        self._task: asyncio.Task[None] | None = None

    # ---- questions ------------------------------------------------------------------------------
    @property
    def is_ready(self) -> bool:
        """Open, and willing to take new requests."""
        return (
            self.sender.is_up
            and self.info is not None
            and not self.info.draining
            and not (self.load is not None and self.load.draining)
            and not self.is_leaving
        )

    @property
    def inflight(self) -> int:
        return len(self._streams)

    def is_healthy(self) -> bool:
        """Heard of within three seconds, and stepping while it has work."""
        now = time.monotonic()
        if not self.sender.is_up or now - self.heard_at > DEAD_AFTER_SECONDS:
            return False
        busy = self._pulse is not None and self._pulse.busy
        return not (busy and now - self._moved_at > STALL_SECONDS)

    async def ping(self) -> bool:
        """A round trip through the engine's core thread. A core that is inside a long step cannot
        answer in time; it counts as well while its step counter moves."""
        if not self.is_healthy():
            return False
        try:
            sending = self.sender.control("ping")
            self._send(sending)
        except LinkDown:
            return False
        assert isinstance(sending.message, Control)
        echo = asyncio.get_running_loop().create_future()
        self._echoes[sending.message.n] = echo
        try:
            async with asyncio.timeout(PING_SECONDS):
                return bool(await echo)
        except TimeoutError:
            return self.is_healthy() and self._pulse is not None and self._pulse.busy
        finally:
            self._echoes.pop(sending.message.n, None)

    def _settle_echoes(self, *, is_over: bool = False) -> None:
        for n, echo in self._echoes.items():
            if not echo.done() and (is_over or n <= self.sender.acked):
                echo.set_result(not is_over)

    # ---- life -----------------------------------------------------------------------------------
    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"engine-link {self.endpoint}")

    async def idle(self) -> None:
        """Returns when no request of ours is under way here."""
        while self._streams:
            self._emptied.clear()
            await self._emptied.wait()

    async def close(self) -> None:
        """Ends the link; its requests are reported lost."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff_seconds = MIN_BACKOFF_SECONDS
        transport = self._transport = self._open(self.endpoint)
        try:
            while True:
                self._opened_at = 0.0
                await self._session(transport)
                if self._opened_at and time.monotonic() - self._opened_at > 1.0:
                    backoff_seconds = MIN_BACKOFF_SECONDS
                await asyncio.sleep(backoff_seconds * random.uniform(0.5, 1.0))
                backoff_seconds = min(backoff_seconds * 2, MAX_BACKOFF_SECONDS)
        finally:
            self._over("closed")
            for task in self._fills:
                task.cancel()
            transport.close()

    async def _session(self, transport: FrontendTransport) -> None:
        """One session, from HELLO to its end."""
        with contextlib.suppress(LinkDown):
            await transport.connected()
            self._reader = asyncio.create_task(self._read(transport))
            pulse = asyncio.create_task(self._beat(self._reader))
            try:
                await asyncio.wait({self._reader})
            finally:
                pulse.cancel()
                self._reader.cancel()
                _, end = await asyncio.gather(pulse, self._reader, return_exceptions=True)
                if isinstance(end, Exception):
                    log.error("engine link %s: %r", self.endpoint, end, exc_info=end)
                self._over("closed")

    async def _read(self, transport: FrontendTransport) -> None:
        reason = ""
        self.heard_at = time.monotonic()
        try:
            self._send(self.sender.hello())
            while not reason:
                frames = await transport.recv()
                self.heard_at = time.monotonic()
                reason = self._on_frames(frames)
                if sum(map(len, frames)) > 1 << 20:  # it took milliseconds, and so may the next
                    await asyncio.sleep(0)
        except LinkDown as error:
            reason = error.reason
        self._over(reason)

    async def _beat(self, reader: asyncio.Task[None]) -> None:
        """Heartbeats, and the end of a session in which the engine is silent."""
        looked_at = time.monotonic()
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            now = time.monotonic()
            # A loop that was busy has not read what the engine said meanwhile: that is no silence.
            self.heard_at += max(0.0, now - looked_at - 2 * HEARTBEAT_SECONDS)
            looked_at = now
            if now - self.heard_at > DEAD_AFTER_SECONDS:
                self._over("silent")
                reader.cancel()
                return
            if self.sender.is_up:
                self._try_send(self.sender.heartbeat())

    def _over(self, reason: str) -> None:
        """Ends the session if one is open or opening."""
        if self.sender.is_up or self.sender.is_opening:
            self._lose(reason, self.sender.end_session(reason))

    def _lose(self, reason: str, rids: Sequence[RequestId]) -> None:
        is_news = self.info is not None or self.last_end != reason
        self.info, self.load, self._pulse, self.last_end = None, None, None, reason
        self._settle_echoes(is_over=True)
        for rid in {*rids, *self._streams}:
            stream = self._take(rid)
            if stream is not None:
                stream.push(Lost(reason))
        if is_news:
            words = INCOMPATIBLE.get(reason, reason)
            log.warning("session with engine %s ended: %s", self.endpoint, words)
        self._on_change(self)

    def _take(self, rid: RequestId) -> Stream | None:
        stream = self._streams.pop(rid, None)
        if not self._streams:
            self._emptied.set()
        return stream

    # ---- up -------------------------------------------------------------------------------------
    def _send(self, sending: Sending) -> None:
        """Hands a message over in the step that made it. Raises LinkDown after ending the session
        (a number that never arrives would be a gap)."""
        assert self._transport is not None
        try:
            self._transport.send(codec.encode_up(sending))
        except LinkDown as error:
            self._over(error.reason)
            if self._reader is not None and self._reader is not asyncio.current_task():
                self._reader.cancel()
            raise

    def _try_send(self, sending: Sending | None) -> bool:
        """False when there is nothing to send, or no session any more."""
        with contextlib.suppress(LinkDown):
            if sending is not None:
                self._send(sending)
                return True
        return False

    async def submit(self, rid: RequestId, request: PreparedRequest, body: RequestBody) -> Stream:
        """Sends a request; values it must carry are made first, the rest is one step.

        Raises LinkDown when there is no session, MediaTooLarge when the engine could never hold
        the items, or the error of a value that cannot be made. Nothing was sent then.
        """
        by_hash = {item.mm_hash: item for item in request.items}
        values: dict[MMHash, SendValue] = {}
        items: list[SendItem] = []
        for _ in range(3):  # values take time; the mirror may have changed meanwhile
            items = [SendItem(i.mm_hash, i.size_bytes, i.injector) for i in request.items]
            missing = [h for h in self.sender.plan_send(items) if h not in values]
            if not missing:
                break
            for mm_hash in missing:
                values[mm_hash] = await self._value_of(by_hash[mm_hash])
        if not self.is_ready:
            raise LinkDown("disconnected")
        sending = self.sender.request(
            rid, items, codec.encode_body(body), values, dict(request.binds).items()
        )
        stream = self._streams[rid] = Stream(rid, request)
        try:
            self._send(sending)
        except LinkDown:
            self._take(rid)
            raise
        for reference in getattr(sending.message, "items", ()):
            if reference.value is not None:
                by_hash[reference.mm_hash].cost.was_sent = True
        self._count_shared(getattr(sending.message, "items", ()))
        return stream

    async def _value_of(self, item: PreparedItem) -> SendValue:
        data = await item.source.value()
        if len(data) != item.size_bytes:
            log.warning(
                "an item was announced with %d bytes but has %d", item.size_bytes, len(data)
            )
            item.size_bytes = len(data)
        digest = codec.digest(data)
        shared = self._shared
        name = "" if shared is None else shared.name(self, item.mm_hash, data, digest)
        return SendValue(data, digest, name)

    def put(self, items: Sequence[SendItem], values: dict[MMHash, SendValue]) -> int:
        """Values without a request. Returns how many were sent (what fits the window)."""
        if not self.is_ready:
            return 0
        if self._shared is not None:
            named = {h: self._shared.name(self, h, v.data, v.digest) for h, v in values.items()}
            values = {h: v._replace(shared_name=named[h]) for h, v in values.items()}
        sending = self.sender.put(items, values)
        if sending is None or not self._try_send(sending):
            return 0
        carried = getattr(sending.message, "items", ())
        self._count_shared(carried)
        return len(carried)

    def _count_shared(self, references: Sequence[ItemRef]) -> None:
        for reference in references:
            if self._shared is not None and isinstance(reference.value, SharedValue):
                self._shared.sent(self, reference.mm_hash)

    def control(self, action: str, value: int = 0, lora: tuple[str, ...] = ()) -> bool:
        """Sends an administration message; False without a session."""
        return self.sender.is_up and self._try_send(self.sender.control(action, value, lora))

    def tell_refusals(self) -> None:
        """Tells the engine of refusals that it is not known to know."""
        self._try_send(self.sender.refuse())

    def abort(self, rid: RequestId) -> None:
        """Nobody wants the outputs any more."""
        if self._take(rid) is None:
            return
        self._try_send(self.sender.abort(rid))

    # ---- down -----------------------------------------------------------------------------------
    def _on_frames(self, frames: Sequence[memoryview]) -> str:
        """Takes in one message; a reason when the session is over."""
        try:
            event = self.sender.on_down(codec.decode_down(frames))
            if event.welcome is not None:
                self.info = codec.decode_info(event.welcome.info)
                self.loras = LoraReport(self.info.loras or ())
                self.boot = event.welcome.boot
                self.name = self.info.engine_id or self.endpoint
                self._moved_at = self._opened_at = time.monotonic()
                log.info("session with engine %s (%s) is open", self.info.engine_id, self.endpoint)
                self._on_change(self)
            self._learn(event)
            self._on_event(event)
        except codec.DecodeError as error:
            log.warning("engine %s sent a malformed message: %s", self.endpoint, error)
            return "malformed"
        return event.session_over

    def _learn(self, event: DownEvent) -> None:
        """Before anybody hears that a session is over: why."""
        if event.death is not None:
            self._on_death(self, event.death.boot, event.death)
        elif event.session_over == "engine_failed":
            self._on_death(self, self.boot, None)
        if event.welcome is not None or event.has_refusals:
            self._on_refusals()

    def _on_event(self, event: DownEvent) -> None:
        if event.session_over:
            self._lose(event.session_over, event.lost)
            return
        self._settle_echoes()
        if event.heartbeat is not None:
            if self._pulse is None or self._pulse.watermark != event.heartbeat.watermark:
                self._moved_at = time.monotonic()
            if not event.heartbeat.busy:
                self._moved_at = time.monotonic()
            self._pulse = event.heartbeat
        for mm_hash in event.needs:
            if self._shared is not None:
                self._shared.needed(self, mm_hash)
            task = asyncio.create_task(self._answer(mm_hash))
            self._fills.add(task)
            task.add_done_callback(self._fills.discard)
        for rid, code in event.rejected:
            stream = self._take(rid)
            if stream is not None:
                stream.push(Rejected(code, stream.value_error))
        if event.outputs is not None:
            self._on_outputs(event.outputs)

    def _on_outputs(self, raw: msgspec.Raw) -> None:
        outputs = codec.decode_outputs(raw)
        if outputs.load is not None:
            self.load = outputs.load
            self.loras = outputs.load.loras or self.loras
            self.own_at_report = len(self._streams)
        for output in outputs.outputs:
            stream = self._streams.get(output.rid)
            if stream is None:
                continue
            if output.finish:
                self._take(output.rid)
                self.sender.finished(output.rid)
            stream.push(output)

    async def _answer(self, mm_hash: MMHash) -> None:
        """FILL when any unfinished request of this link can make the value, else NOFILL."""
        error: FovealError | None = None
        users = [
            (stream, item)
            for stream in self._streams.values()
            for item in stream.request.items
            if item.mm_hash == mm_hash
        ]
        for stream, item in users:
            try:
                data = await item.source.value()
            except FovealError as caught:
                error = stream.value_error = caught
                continue
            if self._try_send(self.sender.fill(mm_hash, SendValue(data, codec.digest(data)))):
                for _, user in users:
                    user.cost.was_sent = True
            return
        if error is not None:
            log.warning("a value an engine needs cannot be made: %s", error.code)
        self._try_send(self.sender.nofill(mm_hash))

    def check_integrity(self) -> None:
        self.sender.check_integrity()
        if self.sender.is_up:
            assert set(self._streams) == set(self.sender.unfinished)
        else:
            assert not self._streams
