"""The watches: what they tell updates the caches and queues the resources to reconcile; an engine
that has ended or gone silent is replaced.

The events come from kopf_watch.py (kopf), which loses deletions when a watch breaks. So every kind
is also listed live: once at the start, after a watch had to restart, and every resync interval;
objects that are gone are dropped then and their owners reconciled. Never writes to the cluster.
Whether a watch lives is decided by what its engine reports, never by what the API server says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError, Forbidden, NotFound
from foveal_operator.kube.kinds import (
    CHILD_SELECTOR,
    ENDPOINT_SLICE,
    INFERENCE,
    POD,
    POD_SELECTOR,
    WATCHED,
    Kind,
)
from foveal_operator.kube.store import Caches, owner_of
from foveal_operator.kube.types import NamespacedName, Obj
from foveal_operator.telemetry.series import Telemetry

log = logging.getLogger(__name__)

RELIST_SECONDS = 10.0
# The time an engine has to bring all of its watches up, discovery and first lists included.
START_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 2.0
MAX_PAUSE_SECONDS = 300.0
DISPENSABLE = (ENDPOINT_SLICE,)
"""What the operator does without where its Role, made by hand, does not allow it."""


def selector_of(kind: Kind) -> str:
    """Server-side filter: all resources, and of every other kind only what is ours."""
    if kind is INFERENCE:
        return ""
    return POD_SELECTOR if kind is POD else CHILD_SELECTOR


class Watch:
    """Args:
    namespaces: what is watched; empty = all namespaces.
    enqueue: takes the key of a resource that should be looked at.
    """

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        telemetry: Telemetry,
        *,
        clock: Clock,
        namespaces: Sequence[str],
        enqueue: Callable[[NamespacedName], None],
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._telemetry = telemetry
        self._clock = clock
        self._asked = tuple(namespaces)
        self.closed: frozenset[str] = frozenset()
        """Namespaces in which it may list nothing now: left out, and asked about again."""
        self._doubted = frozenset[str]()
        """Namespaces in which it was refused when it last asked."""
        self._enqueue = enqueue
        self._stale: dict[str, Kind] = {}
        self._listed: dict[str, float] = {}
        self._refused: frozenset[str] = frozenset()
        self.is_synced = False

    def kinds(self, apis: frozenset[str]) -> tuple[Kind, ...]:
        """What can be watched in a cluster that serves these optional APIs, with our rights."""
        return tuple(
            kind
            for kind in WATCHED
            if (not kind.optional or kind.name in apis) and kind.name not in self._refused
        )

    @property
    def namespaces(self) -> tuple[str, ...]:
        """What to watch now; empty = all namespaces."""
        return tuple(one for one in self._asked if one not in self.closed)

    @property
    def _places(self) -> tuple[str | None, ...]:
        return self.namespaces or (None,)

    async def find_namespaces(self) -> bool:
        """Asks in which namespaces it may list resources: one that is deleted takes its RoleBinding
        along, and must not stop the others. True when that has changed. Raises ApiError; Forbidden
        when it may in none, and when it is refused in one for the first time in a row: an API
        server that has just started refuses for a moment what it allows."""
        if len(self._asked) < 2:
            return False
        closed: dict[str, Forbidden] = {}
        for namespace in self._asked:
            try:
                async for _ in self._cluster.pages(INFERENCE, namespace):
                    break
            except Forbidden as error:
                if error.status != 403:
                    raise  # 401: it does not know us, which says nothing of the namespace
                closed[namespace] = error
        first = [one for one in closed if one not in self.closed and one not in self._doubted]
        self._doubted = frozenset(closed)
        if len(closed) == len(self._asked):
            raise next(iter(closed.values()))
        if first:
            raise closed[first[0]]
        before, self.closed = self.closed, frozenset(closed)
        for namespace in sorted(self.closed - before):
            log.warning(
                "going on without namespace %s: %s; where it was deleted, take it out of "
                "rbac.watchNamespaces, otherwise give the operator its RoleBinding there",
                namespace, closed[namespace].message,
            )  # fmt: skip
            for kind in WATCHED:
                self._drop_all(kind, namespace)
        for namespace in sorted(before - self.closed):
            log.info("namespace %s can be listed again", namespace)
        return self.closed != before

    async def find_rights(self) -> None:
        """Asks whether we may list what we can do without: before it is first listed, and for as
        long as we may not. Raises ApiError for any other answer."""
        for kind in DISPENSABLE:
            if kind.name in self._listed and kind.name not in self._refused:
                continue
            try:
                for namespace in self._places:
                    async for _ in self._cluster.pages(kind, namespace, selector_of(kind)):
                        break
            except Forbidden as error:
                self._refuse(kind, error)
            else:
                self._refused -= {kind.name}

    def _refuse(self, kind: Kind, error: Forbidden) -> None:
        """Goes on without a kind: what is known of it grows old."""
        if kind.name not in self._refused:
            log.warning(
                "going on without %s: %s; grant get, list and watch on %s of %s to the operator",
                kind.plural, error.message, kind.plural, kind.group,
            )  # fmt: skip
        self._refused |= {kind.name}
        self._drop_all(kind)

    def _drop_all(self, kind: Kind, namespace: str | None = None) -> None:
        for body in self._caches.keep_only(kind, (), self._caches.uids(kind, namespace)):
            self._owner_changed(kind, body)

    def on_event(self, kind: Kind, change: str | None, body: Obj) -> None:
        """One watch event; None as change marks an object of a list that a watch began with."""
        metadata = body["metadata"]
        if change == "DELETED":
            at = (metadata.get("namespace", ""), metadata["name"], metadata["uid"])
            known = self._caches.drop(kind, *at, metadata.get("resourceVersion", ""))
            if known is not None:
                self._owner_changed(kind, body)
            return
        self._take(kind, body)
        if change is None:
            self._began_anew(kind)

    def _take(self, kind: Kind, body: Obj, listed_since: int = -1) -> bool:
        """Whether it was news: then its resource is looked at, and the one that it was of before.
        That one has to give the label back that names it."""
        metadata = body["metadata"]
        before = self._caches.owner(kind, metadata.get("namespace", ""), metadata["name"])
        if not self._caches.put(kind, body, listed_since):
            return False
        self._owner_changed(kind, body)
        if before is not None and before != owner_of(kind, body):
            self._enqueue(before)
        return True

    def _began_anew(self, kind: Kind) -> None:
        """The engine has listed: what was deleted before that list, no event will tell."""
        listed = self._listed.get(kind.name)
        if listed is not None and self._clock.monotonic() - listed > RELIST_SECONDS:
            self._stale[kind.name] = kind

    def _owner_changed(self, kind: Kind, body: Obj) -> None:
        owner = owner_of(kind, body)
        if owner is not None:
            self._enqueue(owner)
        self._telemetry.set(
            "foveal_operator_cached_objects", self._caches.count(kind), kind=kind.name
        )

    async def sync(self, kinds: Sequence[Kind]) -> None:
        """Lists all of these kinds and looks at every resource. Raises ApiError; the resource's
        own API must be there, any other may be missing."""
        for kind in kinds:
            await self.relist(kind)
        self.is_synced = True
        for key in self._caches.keys(INFERENCE):
            self._enqueue(key)

    async def relist_stale(self) -> None:
        """Lists what a broken watch may have missed. Call every few seconds."""
        for kind in list(self._stale.values()):
            try:
                await self.relist(kind)
            except ApiError as error:
                log.warning("list of %s: %s", kind.plural, error)
                continue

    async def relist(self, kind: Kind) -> None:
        """One live list of a kind; whatever the watch had not told is taken in."""
        was_synced = kind.name in self._listed
        for namespace in self._places:
            num_missed = await self._relist(kind, namespace)
            # These change all the time: a list that overtakes the watch by a moment is no news.
            if num_missed and was_synced and kind not in (POD, ENDPOINT_SLICE):
                log.info("%d %s were not told by the watch", num_missed, kind.plural)
                self._telemetry.count("foveal_operator_watch_missed", num_missed, kind=kind.name)
        self._listed[kind.name] = self._clock.monotonic()
        self._stale.pop(kind.name, None)

    async def _relist(self, kind: Kind, namespace: str | None) -> int:
        """How many objects were missing, stale or ghosts."""
        before, mark = self._caches.uids(kind, namespace), self._caches.mark
        listed, num_missed = set[str](), 0
        try:
            async for page in self._cluster.pages(kind, namespace, selector_of(kind)):
                for body in page:
                    listed.add(body["metadata"]["uid"])
                    num_missed += self._take(kind, body, mark)
        except NotFound as error:
            if kind is INFERENCE or not kind.optional:
                text = f"the cluster does not serve {kind.plural} of {kind.api_version}"
                raise NotFound(text, error.status) from error
        except Forbidden as error:
            if kind not in DISPENSABLE:
                raise
            self._refuse(kind, error)
            return 0
        ghosts = self._caches.keep_only(kind, listed, before)
        for body in ghosts:
            self._owner_changed(kind, body)
        return num_missed + len(ghosts)


class Watches(Protocol):
    """One life of the watches over a set of kinds; `failure` says what has ended it."""

    failure: str

    @property
    def is_alive(self) -> bool: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def lookup_silent(self) -> tuple[str, ...]:
        """Names of what no watch is known to follow now."""
        ...

    def was_refused(self) -> bool:
        """Whether it lacked a right since the last call."""
        ...


MakeWatches = Callable[[tuple[Kind, ...], tuple[str, ...]], Watches]


class WatchKeeper:
    """Args:
    make: an engine for these kinds in these namespaces (none: in all), not started.
    """

    def __init__(self, make: MakeWatches, clock: Clock) -> None:
        self._make = make
        self._clock = clock
        self._engine: Watches | None = None
        self.follows: tuple[tuple[Kind, ...], tuple[str, ...]] = ((), ())
        self._started = 0.0
        self._pause_seconds = FIRST_PAUSE_SECONDS

    def start(self, kinds: tuple[Kind, ...], namespaces: tuple[str, ...]) -> None:
        """Watches these kinds in these namespaces from now on, and no others."""
        self.stop()
        self.follows = (kinds, namespaces)
        self._started = self._clock.monotonic()
        self._engine = self._make(kinds, namespaces)
        self._engine.start()

    def stop(self) -> None:
        """Asks the engine to end and does not wait: it has nothing to save."""
        if self._engine is not None:
            self._engine.stop()
            self._engine = None

    def lookup_failure(self) -> str:
        """What is not watched, in words; "" while all is."""
        if self._engine is None:
            return "the watches have not been started"
        if not self._engine.is_alive:
            failure = self._engine.failure
            return f"the watches have ended: {failure}" if failure else "the watches have ended"
        silent = self._engine.lookup_silent()
        return f"no watch of {', '.join(silent)}" if silent else ""

    def was_refused(self) -> bool:
        return self._engine is not None and self._engine.was_refused()

    def restart_if_due(self) -> bool:
        """Call every few seconds once started. True when the watches were started anew.

        A dead engine is replaced at once, a deaf one after START_SECONDS; the next time not before
        a pause that doubles up to MAX_PAUSE_SECONDS and is short again once all was well.
        """
        failure = self.lookup_failure()
        if not failure:
            self._pause_seconds = FIRST_PAUSE_SECONDS
            return False
        age = self._clock.monotonic() - self._started
        is_alive = self._engine is not None and self._engine.is_alive
        if age < max(self._pause_seconds, START_SECONDS if is_alive else 0.0):
            return False
        log.error("%s: restarting the watches", failure)
        self._pause_seconds = min(MAX_PAUSE_SECONDS, 2.0 * self._pause_seconds)
        self.start(*self.follows)
        return True
