"""Leader election over one Lease: who writes, and when that must stop.

Run by main.py, one Elector per replica. Trusts no clock but its own monotonic one: a record counts
as expired when it has not changed for its duration *as seen here*. The right to write ends at the
renew deadline, counted from the start of the last renewal that worked; a watchdog that waits for
nothing else ends the process then. Never starts or stops workers itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError, Conflict
from foveal_operator.kube.kinds import LEASE
from foveal_operator.kube.types import Obj

log = logging.getLogger(__name__)


class LeaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations as client-go's: a lost leader stops 5 s before another can begin."""

    namespace: str
    name: str = "foveal-operator"
    identity: str
    lease_seconds: float = 15.0
    renew_seconds: float = 10.0
    retry_seconds: float = 1.5

    def check(self) -> None:
        """Raises ValueError for durations under which two could lead."""
        if not self.lease_seconds > self.renew_seconds > 1.2 * self.retry_seconds > 0:
            raise ValueError(
                "lease seconds must exceed renew seconds, and these 1.2 times the retry seconds; "
                f"got {self.lease_seconds:g}, {self.renew_seconds:g}, {self.retry_seconds:g}"
            )


class Elector:
    """One replica's side of the election.

    Args:
        on_lost: called at once, from the loop, when the right to write has ended; in production
            it ends the process without any clean-up (os._exit).
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: LeaseSettings,
        *,
        clock: Clock,
        on_lost: Callable[[], None],
    ) -> None:
        settings.check()
        self._cluster = cluster
        self._settings = settings
        self._clock = clock
        self._on_lost = on_lost
        self._record: Obj = {}
        self._record_seen = 0.0
        self._renewed = float("-inf")
        self._is_leading = False
        self.last_answer_seconds = float("-inf")

    @property
    def is_leading(self) -> bool:
        return self._is_leading

    def may_write(self) -> bool:
        """Whether the lease still covers a write that begins now. Effect-free."""
        return self._is_leading and self._clock.monotonic() < self._deadline()

    def _deadline(self) -> float:
        return self._renewed + self._settings.renew_seconds

    async def run(self, on_started: Callable[[], Awaitable[None]]) -> None:
        """Acquires, calls `on_started`, renews until cancelled or lost. Raises what `on_started`
        raises: whoever leads and does not work keeps the others from it."""
        while not await self._try(self._settings.renew_seconds):
            await self._clock.sleep(self._jittered())
        self._is_leading = True
        log.info("leading", extra={"identity": self._settings.identity})
        watchdog = asyncio.ensure_future(self._watch_deadline())
        # Beside the renewals, not before them: getting to work may take longer than a lease lasts.
        starting = asyncio.ensure_future(on_started())
        try:
            await self._keep(starting)
        finally:
            watchdog.cancel()
            starting.cancel()

    async def _keep(self, starting: asyncio.Future[None]) -> None:
        while self._is_leading:
            await self._clock.sleep(self._settings.retry_seconds)
            if starting.done():
                starting.result()
            left = self._deadline() - self._clock.monotonic()
            if left <= 0:
                break
            if not await self._try(left) and self._is_held_by_other():
                log.error("another replica holds the lease")
                break
        self._lose()

    async def _watch_deadline(self) -> None:
        """Does not wait for any API call: a hanging renewal cannot prolong the right to write."""
        while (left := self._deadline() - self._clock.monotonic()) > 0:
            await self._clock.sleep(left)
        self._lose()

    def _lose(self) -> None:
        if self._is_leading:
            self._is_leading = False
            log.error("the lease is lost")
            self._on_lost()

    def _jittered(self) -> float:
        return self._settings.retry_seconds * (1.0 + 0.2 * self._clock.random())

    async def _try(self, within_seconds: float) -> bool:
        """Acquires or renews once. False when another holds it or the API does not answer."""
        started = self._clock.monotonic()
        try:
            async with asyncio.timeout(within_seconds):
                held = await self._acquire_or_renew()
        except (ApiError, TimeoutError) as error:
            log.warning("lease: %s", error or "no answer in time")
            return False
        self.last_answer_seconds = self._clock.monotonic()
        if held:
            # From before the request: the server may have stored it at any time since.
            self._renewed = started
        return held

    async def _acquire_or_renew(self) -> bool:
        settings = self._settings
        live = await self._cluster.get(LEASE, settings.namespace, settings.name)
        now = self._clock.now_micro()
        if live is None:
            made = await self._cluster.create(self._body({}, now, is_new_holder=True))
            if made is not None:
                self._remember(made)
            return made is not None
        if live.get("spec") != self._record.get("spec"):
            self._remember(live)
        mine = self._holder(live) == settings.identity
        if not mine and self._holder(live) and not self._is_expired():
            return False
        try:
            stored = await self._cluster.update(self._body(live, now, is_new_holder=not mine))
        except Conflict:
            return False
        self._remember(stored)
        return True

    def _remember(self, record: Obj) -> None:
        self._record = record
        self._record_seen = self._clock.monotonic()

    def _is_expired(self) -> bool:
        given = self._record.get("spec", {}).get("leaseDurationSeconds")
        seconds = float(given or self._settings.lease_seconds)
        return self._clock.monotonic() >= self._record_seen + seconds

    @staticmethod
    def _holder(lease: Obj) -> str:
        return str(lease.get("spec", {}).get("holderIdentity") or "")

    def _is_held_by_other(self) -> bool:
        return self._holder(self._record) not in ("", self._settings.identity)

    def _body(self, live: Obj, now: str, *, is_new_holder: bool) -> Obj:
        settings = self._settings
        spec = dict(live.get("spec", {}))
        transitions = int(spec.get("leaseTransitions") or 0)
        spec.update(
            holderIdentity=settings.identity,
            leaseDurationSeconds=max(1, round(settings.lease_seconds)),
            renewTime=now,
            leaseTransitions=transitions + (1 if is_new_holder and live else 0),
        )
        if is_new_holder:
            spec["acquireTime"] = now
        metadata = {"name": settings.name, "namespace": settings.namespace}
        if live:
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.name,
            "metadata": metadata,
            "spec": spec,
        }

    async def release(self) -> None:
        """Gives the lease back, so that another can lead at once. Call when no worker runs."""
        if not self._is_leading:
            return
        self._is_leading = False
        spec = {
            **self._record.get("spec", {}),
            "holderIdentity": "",
            "leaseDurationSeconds": 1,
            "renewTime": self._clock.now_micro(),
        }
        body = {**self._body(self._record, "", is_new_holder=False), "spec": spec}
        try:
            async with asyncio.timeout(2.0):
                await self._cluster.update(body)
        except (ApiError, TimeoutError) as error:
            log.warning("the lease was not released: %s", error)
