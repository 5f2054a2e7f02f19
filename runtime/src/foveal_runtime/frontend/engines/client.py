"""All engines as one: routing, sending, and carrying a request on when its engine goes.

Implements `interfaces.Generator` and `interfaces.Knowledge`; one per HTTP process. A request whose
engine dies, drains or forgets it is sent elsewhere with the tokens already emitted, under a new
attempt number; nothing is emitted twice. Never decodes media, never blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from urllib.parse import urlsplit

import msgspec

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.engines.debug import MirrorView
from foveal_runtime.frontend.engines.link import EngineLink
from foveal_runtime.frontend.engines.loras import served_loras, serves, why_none
from foveal_runtime.frontend.engines.quarantine import Quarantine
from foveal_runtime.frontend.engines.routing import Candidate, Router, estimate_load
from foveal_runtime.frontend.engines.run import (
    MAX_ATTEMPTS,
    MAX_REJECTIONS,
    EngineRun,
    Fate,
    Life,
    Lost,
    Rejected,
    Stream,
)
from foveal_runtime.frontend.engines.shared_values import SharedValues
from foveal_runtime.frontend.items.interfaces import EnginesLoad
from foveal_runtime.frontend.items.prepared import PreparedRequest
from foveal_runtime.mirror.messages import Death
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.plan.config import EngineAddress, FrontendConfig
from foveal_runtime.plan.errors import (
    EngineFailure,
    MediaTooLarge,
    MediaUnknown,
    NoEngine,
    Overloaded,
    from_wire,
)
from foveal_runtime.plan.lora import LoraRef
from foveal_runtime.plan.media import ItemMeta, MMHash
from foveal_runtime.wire.messages import EngineOutput
from foveal_runtime.wire.transport import FrontendTransport, LinkDown, ZmqDealer

log = logging.getLogger(__name__)

RESOLVE_SECONDS = 5.0
HOLDER_WAIT_SECONDS = 5.0
"""How long a request by uuid alone waits for an engine that may hold its media to come back."""
_PLANNED_ENDS = ("draining", "closed")
"""Ends of sessions that nobody died of: the engine's own goodbye, and ours."""


class EngineClient:
    """The frontend's sessions with all engines.

    Args:
        namespace: `wire.namespace.model_namespace` of the served model.
        open_transport: endpoint → transport; default ZMQ with the configured keys.
        resolve: name → addresses, for `dns` engines.
    """

    def __init__(
        self,
        config: FrontendConfig,
        namespace: bytes,
        *,
        stats: FrontendStats | None = None,
        open_transport: Callable[[str], FrontendTransport] | None = None,
        resolve: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        self.config = config
        self.namespace = namespace
        self.stats = stats or FrontendStats()
        self.router = Router()
        # The routing id at the engine: several HTTP processes of a pod are several frontends.
        self.frontend_id = f"{config.frontend_id}/{os.getpid()}-{secrets.token_hex(3)}"
        self._open = open_transport or self._open_zmq
        self._resolve = resolve or _addresses
        self._links: dict[str, EngineLink] = {}
        self._leaving: dict[str, EngineLink] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._max_model_len = 0
        self.quarantine = Quarantine(turn_seconds=config.admission.no_engine_wait_seconds)
        self.shared = SharedValues.from_config(config, time.time_ns(), self.links)

    # ---- life -----------------------------------------------------------------------------------
    async def start(self) -> None:
        """Opens links to the configured engines; returns at once, sessions follow."""
        self.set_endpoints([a.endpoint for a in self.config.engines if not a.dns])
        names = [address for address in self.config.engines if address.dns]
        if names:
            self._watcher = asyncio.create_task(self._watch_names(names))

    async def close(self) -> None:
        tasks = [t for t in (self._watcher, *self._finishing) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        links = [*self._links.values(), *self._leaving.values()]
        await asyncio.gather(*(link.close() for link in links))
        self._links.clear()
        if self.shared is not None:
            self.shared.close()

    def set_endpoints(self, endpoints: Sequence[str]) -> None:
        """The engines that there are. One that left finishes what it has, unless it is back."""
        for endpoint in [e for e in self._links if e not in endpoints]:
            self._leave(endpoint)
        for endpoint in endpoints:
            if (back := self._leaving.pop(endpoint, None)) is not None:
                self._links[endpoint], back.is_leaving = back, False
                self._on_change(back)
            elif endpoint not in self._links:
                sender = Sender(
                    self.frontend_id, frontend_boot=time.time_ns(), namespace=self.namespace,
                    node=self.config.node, refusals=self.quarantine.book,
                )  # fmt: skip
                link = EngineLink(
                    endpoint, sender, self._open, on_change=self._on_change, shared=self.shared,
                    on_death=self._on_death, on_refusals=self._tell_refusals,
                )  # fmt: skip
                self._links[endpoint] = link
                link.start()

    def links(self) -> list[EngineLink]:
        """For metrics and tests; one per engine."""
        return list(self._links.values())

    def _leave(self, endpoint: str) -> None:
        link = self._leaving[endpoint] = self._links.pop(endpoint)
        link.is_leaving = True
        self.router.forget(endpoint)
        if self.shared is not None:
            self.shared.forget(endpoint)

        async def finish() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.drain_timeout_seconds):
                    await link.idle()
            if self._leaving.get(endpoint) is link:  # it is not back
                del self._leaving[endpoint]
                await link.close()

        task = asyncio.create_task(finish())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _open_zmq(self, endpoint: str) -> FrontendTransport:
        return ZmqDealer(endpoint, self.frontend_id, keys=self.config.curve)

    def _on_change(self, link: EngineLink) -> None:
        if link.info is not None:
            self._max_model_len = min(
                (known.info.max_model_len for known in self._links.values() if known.info),
                default=self._max_model_len,
            )
        else:
            self.router.forget(link.endpoint)
        self._changed.set()
        self._changed = asyncio.Event()

    def _on_death(self, link: EngineLink, boot: int, death: Death | None) -> None:
        self.quarantine.on_death((link.endpoint, boot), death)
        self._tell_refusals()
        self._changed.set()
        self._changed = asyncio.Event()

    def _tell_refusals(self) -> None:
        for link in self._links.values():
            link.tell_refusals()

    async def _spread_refusals(self) -> None:
        """Until every engine that answers knows them: the client may ask another frontend next."""
        self._tell_refusals()
        await self.health()

    async def clear_quarantine(self) -> int:
        """Takes requests again that engines died of, everywhere; how many engines were told."""
        self.quarantine.clear()
        await self._spread_refusals()
        return sum(link.sender.is_up for link in self._links.values())

    async def _watch_names(self, names: Sequence[EngineAddress]) -> None:
        """Every address behind each name is an engine; asked again every few seconds."""
        static = [a.endpoint for a in self.config.engines if not a.dns]
        known: dict[str, list[str]] = {}
        while True:
            for address in names:
                parts = urlsplit(address.endpoint)
                host, port = parts.hostname or "", parts.port or 5570
                try:
                    found = await asyncio.to_thread(self._resolve, host, port)
                except OSError as error:
                    # A name server's bad moment must not send every engine away.
                    log.warning("cannot resolve engines at %s: %s", host, error)
                    continue
                known[address.endpoint] = [
                    f"{parts.scheme}://{f'[{ip}]' if ':' in ip else ip}:{port}" for ip in found
                ]
            self.set_endpoints([*static, *(e for group in known.values() for e in group)])
            await asyncio.sleep(RESOLVE_SECONDS)

    # ---- Knowledge ------------------------------------------------------------------------------
    def lookup_item(self, mm_hash: MMHash) -> tuple[int, ItemMeta] | None:
        found = (link.sender.confirmed.get(mm_hash) for link in self._links.values())
        return next(((size, meta) for size, meta in filter(None, found) if meta is not None), None)

    def lookup_alias(self, alias: bytes) -> bytes | None:
        found = (link.sender.lookup_binding(alias) for link in self._links.values())
        return next((bound for bound in found if bound is not None), None)

    def max_model_len(self) -> int:
        return self._max_model_len

    def num_ready_engines(self) -> int:
        return sum(link.is_ready for link in self._links.values())

    def load(self) -> EnginesLoad:
        known = [link.load for link in self._links.values() if link.load is not None]
        return EnginesLoad(
            num_running=sum(one.num_running for one in known),
            num_waiting=sum(one.num_waiting for one in known),
            kv_usage=max((one.kv_usage for one in known), default=0.0),
        )

    def loras(self) -> dict[str, LoraRef]:
        return served_loras(self._links.values())

    async def health(self) -> bool:
        """Some engine's core answered a message just now, or is in a step and makes progress."""
        return any(await asyncio.gather(*(link.ping() for link in self._links.values())))

    def control(self, action: str, value: int = 0) -> int:
        """Administration of every engine's caches. Returns how many were told."""
        return sum(link.control(action, value) for link in self._links.values())

    def has_cache(self) -> bool:
        return any(link.is_ready and link.sender.capacity_bytes for link in self._links.values())

    def put(self, items: Sequence[SendItem], values: dict[MMHash, SendValue]) -> int:
        """Offers values to the engine with the most room for them; how many were sent."""
        ready = [link for link in self._links.values() if link.is_ready]
        if not ready:
            return 0
        link = max(ready, key=lambda one: one.sender.window_bytes - one.sender.inflight_bytes)
        return link.put(items, values)

    def mirrors(self) -> dict[str, MirrorView]:
        """What this process believes of each engine it has a session with, by engine name."""
        return {
            link.name: MirrorView.of(link.sender, link.inflight)
            for link in self._links.values()
            if link.sender.is_up
        }

    # ---- requests -------------------------------------------------------------------------------
    async def generate(self, request: PreparedRequest) -> AsyncGenerator[EngineOutput, None]:
        """See `interfaces.Generator`."""
        run = EngineRun(request)
        link: EngineLink | None = None
        stream: Stream | None = None
        try:
            self.quarantine.check(run)
            while True:
                link, stream = await self._submit(run)
                async with contextlib.aclosing(self._follow(run, link, stream)) as outputs:
                    async for output in outputs:
                        if output.finish:
                            stream = None
                        yield output
                        if output.finish:
                            return
                stream = None
        finally:
            if link is not None and stream is not None:
                link.abort(stream.rid)
            self.quarantine.leave(run)
            run.count(self.stats)
            for item in request.items:
                item.source.release()

    async def _submit(self, run: EngineRun) -> tuple[EngineLink, Stream]:
        """Sends the next attempt to the best engine there is, waiting for one if need be."""
        await self._let_it_show(run)
        await self.quarantine.wait_for_turn(run)
        deadline = time.monotonic() + self.config.admission.no_engine_wait_seconds
        while True:
            changed = self._changed
            self.quarantine.check(run)  # convicted meanwhile, here or elsewhere
            picked = self._choose(run)
            if picked is None:
                await self._wait_for_engine(run, changed, deadline)
                continue
            link, why = picked
            rid, run.attempt = (run.request.request_id, run.attempt), run.attempt + 1
            try:
                with self.stats.stages.measure("send"):
                    stream = await link.submit(rid, run.request, run.body())
            except LinkDown:
                run.num_losses += 1  # a link alone: nobody died of what was never sent
                await self._let_it_show(run)
                continue
            self.quarantine.sent(run, (link.endpoint, link.boot))
            self.router.commit(link.endpoint, run.affinity)
            self.stats.picks[link.name, why] += 1
            return link, stream

    async def _wait_for_engine(
        self, run: EngineRun, changed: asyncio.Event, deadline: float
    ) -> None:
        lost = None
        if self.num_ready_engines() and any(i.is_held_only for i in run.request.items):
            text = "the media behind a uuid is no longer held by any engine; send it again"
            lost = MediaUnknown(text)
            # A holder whose link broke a moment ago has it still.
            if all(link.sender.is_up for link in self._links.values()):
                raise lost
            limit = self.config.admission.no_engine_wait_seconds
            deadline += min(limit, HOLDER_WAIT_SECONDS) - limit
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await changed.wait()
        except TimeoutError:
            if lost is not None:
                raise lost from None
            text = f"no engine was ready within {self.config.admission.no_engine_wait_seconds:g} s"
            text += why_none(self._links.values(), run.request)
            raise NoEngine(text, retry_after_seconds=5) from None

    def _choose(self, run: EngineRun) -> tuple[EngineLink, str] | None:
        ready = {link.endpoint: link for link in self._links.values() if serves(link, run.request)}
        candidates = [self._candidate(link, run) for link in ready.values()]
        fresh = [c for c in candidates if c.name not in run.avoid]
        home = run.home([link.sender for link in ready.values()])
        pick = self.router.choose(fresh or candidates, run.affinity, home)
        return None if pick is None else (ready[pick.name], pick.why)

    def _candidate(self, link: EngineLink, run: EngineRun) -> Candidate:
        held, has_all = 0, True
        for item in run.request.items:
            if link.sender.believes(item.mm_hash):
                held += item.size_bytes
            elif item.is_held_only:
                has_all = False
        reported = 0 if link.load is None else link.load.num_running + link.load.num_waiting
        load = estimate_load(link.inflight, reported, link.own_at_report)
        return Candidate(link.endpoint, load, held, has_all)

    async def _follow(
        self, run: EngineRun, link: EngineLink, stream: Stream
    ) -> AsyncGenerator[EngineOutput, None]:
        """Outputs of one attempt. Ends without a finish when another attempt is due."""
        boot = link.boot
        while True:
            event = await stream.next()
            if isinstance(event, Lost):
                self.stats.resubmissions[event.reason] += 1
                if event.reason not in _PLANNED_ENDS:
                    self.quarantine.lost(run, (link.endpoint, boot), event.reason)
                return
            if isinstance(event, Rejected):
                self._on_rejected(run, link, event)
                return
            if event.finish == "error":
                if event.error is not None and event.error[0] == "overloaded":
                    # Refused by the scheduler instead of the value cache: the same to us.
                    self._on_rejected(run, link, Rejected("overloaded", None))
                    return
                raise from_wire(*(event.error or ("engine_error", "the engine gave no reason")))
            if event.finish == "abort":
                # Not by us: the engine gave it up (drain, restart of its runner).
                self.stats.resubmissions["engine_abort"] += 1
                if event.token_ids:
                    yield run.take(msgspec.structs.replace(event, finish=""))
                return
            run.count(self.stats)
            self.quarantine.got_on(run)
            yield run.take(event)
            if event.finish:
                return

    def _fate_of(self, run: EngineRun, life: Life, lost_at: float) -> Fate:
        link = self._links.get(life[0])
        boot = link.boot if link is not None and link.sender.is_up else None
        return self.quarantine.fate_of(run, life, lost_at, boot, may_tell=link is not None)

    async def _let_it_show(self, run: EngineRun) -> None:
        """Before another engine is risked: how many has this request killed? Raises EngineFailure
        when it is too many."""
        await asyncio.sleep(run.pause_seconds)
        while True:
            changed = self._changed
            try:
                if run.settle(self._fate_of):
                    return
            except EngineFailure:
                if run.attempt < MAX_ATTEMPTS:  # else its links broke: nobody died of it
                    self.quarantine.convict(run)
                    await self._spread_refusals()
                raise
            limits = self.config.admission.no_engine_wait_seconds, self.quarantine.evidence_seconds
            overdue = min(
                lost_at + limits[self.quarantine.waits_for(run, life, lost_at)]
                for life, lost_at in run.suspects.items()
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, overdue - time.monotonic())):
                    await changed.wait()

    def _on_rejected(self, run: EngineRun, link: EngineLink, event: Rejected) -> None:
        """Raises what the client must know; returns when another attempt is worth it."""
        code = event.code
        if code == "mm_source_lost":
            if event.error is not None:
                raise event.error
            if any(item.is_held_only for item in run.request.items):
                raise MediaUnknown("the media behind a uuid is no longer held; send it again")
        elif code in ("mm_too_large", "media_too_large"):
            raise MediaTooLarge("the request's media are larger than the engines' value cache")
        elif code not in ("overloaded", "duplicate_request", "draining", "mm_value_damaged"):
            raise from_wire(code, f"the engine refused the request: {code}")
        elif code in ("overloaded", "draining"):
            run.avoid.add(link.endpoint)
        self.stats.resubmissions[code] += 1
        run.rejections += 1
        if code == "overloaded" and run.rejections >= max(1, self.num_ready_engines()):
            raise Overloaded("every engine's queue is full")
        if run.rejections > MAX_REJECTIONS:
            raise EngineFailure(f"the engines refused the request {run.rejections} times: {code}")


def _addresses(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})
