"""The operator's process: puts the parts together, runs them, and ends them in order.

Every replica watches; only the leader's workers run. SIGTERM ends within three seconds: no new
key, workers finish or are cut off, the lease is given back. A lost lease ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable

from foveal_operator.common.clock import Clock
from foveal_operator.common.errors import UsageError
from foveal_operator.common.logs import set_up_logs
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.errors import ApiError, Conflict, NotFound, NotLeader, Transient
from foveal_operator.kube.events import EventRecorder
from foveal_operator.kube.kinds import INFERENCE, JOB, POD, STATEFUL_SET, Kind
from foveal_operator.kube.lease import Elector
from foveal_operator.kube.queue import MAX_SECONDS, WorkQueue
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName
from foveal_operator.kube.watches import MakeWatches, Watch, Watches, WatchKeeper
from foveal_operator.pods.events import PodAsker, PodEvents
from foveal_operator.pods.probes import PodProber, aiohttp_fetch
from foveal_operator.pods.reports import ObservePods, Reports
from foveal_operator.process.options import Options, read
from foveal_operator.process.server import ProbeServer
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.reconcile.reconciler import Reconciler
from foveal_operator.telemetry.declared import CONTROLLER
from foveal_operator.telemetry.series import Telemetry

log = logging.getLogger(__name__)

MAX_CONFLICTS = 5
TICK_SECONDS = 2.0
STUCK_SECONDS = 300.0
SILENT_SECONDS = 30.0
STOP_SECONDS = 1.0
MAX_RESYNC_PAUSE_SECONDS = 60.0
QUESTION_SECONDS = 60.0
"""Namespaces that were closed to it are asked about so often, also after it lacked a right."""
DOUBT_SECONDS = 5.0
"""Until it asks once more about one that was open: an API server that starts refuses anything."""
GC_OBJECTS = 10_000


class Workers:
    """Takes keys from the queue and runs passes; says what happens after each."""

    def __init__(
        self,
        reconciler: Reconciler,
        queue: WorkQueue[NamespacedName],
        telemetry: Telemetry,
        clock: Clock,
    ) -> None:
        self._reconciler = reconciler
        self._queue = queue
        self._telemetry = telemetry
        self._clock = clock
        self._conflicts: dict[NamespacedName, int] = {}
        self._refused_since: dict[NamespacedName, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, num_workers: int) -> None:
        self._tasks = [asyncio.create_task(self._work()) for _ in range(num_workers)]

    async def stop(self, seconds: float) -> None:
        """No new key; what runs may finish within `seconds`, then it is cut off."""
        self._queue.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self) -> None:
        while (key := await self._queue.take()) is not None:
            started = self._clock.monotonic()
            try:
                result = await self.once(key)
            finally:
                self._queue.done(key)
            seconds = self._clock.monotonic() - started
            self._telemetry.count(
                "controller_runtime_reconcile", controller=CONTROLLER, result=result
            )
            if result == "error":
                self._telemetry.count("controller_runtime_reconcile_errors", controller=CONTROLLER)
            self._telemetry.observe(
                "controller_runtime_reconcile_time_seconds", seconds, controller=CONTROLLER
            )

    async def once(self, key: NamespacedName) -> str:
        """One pass and what follows from it. Returns success, requeue or error; never raises."""
        try:
            outcome = await self._reconciler.reconcile(key, self._queue.core.num_failures(key))
        except NotLeader:
            return "error"
        except Conflict as error:
            # Somebody was faster: what we know is old. The watch is about to tell.
            count = self._conflicts[key] = self._conflicts.get(key, 0) + 1
            if count <= MAX_CONFLICTS:
                self._queue.add(key)
                return "requeue"
            log.warning("%s/%s: %s, for the %dth time", *key, error, count)
            self._queue.retry(key)
            return "error"
        except ApiError as error:
            after = error.retry_after_seconds if isinstance(error, Transient) else 0.0
            seconds = self._queue.retry(key, after)
            log.warning("%s/%s: %s; again in %.1f s", *key, error, seconds)
            return "error"
        except Exception:
            seconds = self._queue.retry(key)
            log.exception("%s/%s: a defect of the operator; again in %.1f s", *key, seconds)
            return "error"
        self._conflicts.pop(key, None)
        self._queue.forget(key)
        again = outcome.again_seconds
        if not outcome.is_refused:
            self._refused_since.pop(key, None)
        elif again is not None:
            # As long again as it has been refused.
            now = self._clock.monotonic()
            since = now - self._refused_since.setdefault(key, now)
            again = min(MAX_SECONDS, max(again, since)) * (1.0 + 0.1 * self._clock.random())
        if again is not None:
            self._queue.add_after(key, again)
            return "requeue_after"
        return "success"


class Operator:
    """One replica over any Cluster; the watch engine and the process are main()'s.

    Args:
        on_lost: ends the process when the lease is lost.
        make_watches: as WatchKeeper takes it.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: Options,
        telemetry: Telemetry,
        *,
        clock: Clock,
        observe_pods: ObservePods,
        on_lost: Callable[[], None],
        make_watches: MakeWatches,
        forget_pods: Callable[[Iterable[str]], None] = lambda uids: None,
    ) -> None:
        self.cluster = cluster
        self.options = options
        self.telemetry = telemetry
        self.clock = clock
        self.caches = Caches()
        self.inventory = Inventory(cluster, clock)
        self.queue: WorkQueue[NamespacedName] = WorkQueue(CONTROLLER, clock, telemetry)
        self.watch = Watch(
            cluster,
            self.caches,
            telemetry,
            clock=clock,
            namespaces=options.namespaces,
            enqueue=self.queue.add,
        )
        self.reconciler = Reconciler(
            cluster,
            self.caches,
            self.inventory,
            EventRecorder(cluster, clock, options.identity),
            telemetry,
            clock=clock,
            settings=options.settings,
            observe_pods=observe_pods,
        )
        self.workers = Workers(self.reconciler, self.queue, telemetry, clock)
        self.elector: Elector | None = None
        if options.lease is not None:
            self.elector = Elector(cluster, options.lease, clock=clock, on_lost=on_lost)
        self.watches = WatchKeeper(make_watches, clock)
        self._forget_pods = forget_pods
        self._next_resync = 0.0
        self._pause_seconds = TICK_SECONDS
        self._next_question = 0.0
        self._is_doubted, self._doubt_seconds = False, DOUBT_SECONDS
        self._synced_at = float("-inf")
        self._next_beat = 0.0
        self._is_served = True
        self._waiting_for = "the first list"

    def may_write(self) -> bool:
        """Gate of every write."""
        return self.elector is None or self.elector.may_write()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_true())
            if self.elector is not None:
                group.create_task(self.elector.run(self._lead))
            else:
                group.create_task(self._lead())

    async def stop(self) -> None:
        """After `run` was cancelled: in order, within about two seconds."""
        self.watches.stop()
        await self.workers.stop(STOP_SECONDS)
        if self.elector is not None:
            await self.elector.release()

    async def _lead(self) -> None:
        """Works once the caches are complete and true: listed since nobody else may write."""
        since = self.clock.monotonic()
        while not self.watch.is_synced:
            await self.clock.sleep(0.05)
        while self._synced_at < since:
            # A standby's watch may have been silent; what it knew would undo what has been done.
            # So would a list of a moment ago, which the last leader's last writes are not in.
            try:
                await self._resync()
            except ApiError as error:
                log.warning("list before leading: %s", error)
                await self.clock.sleep(1.0)
        self.workers.start(self.options.num_workers)

    async def _keep_true(self) -> None:
        """First list, then every tick: what is stale; every resync: everything."""
        pause = 0.5
        while not self.watch.is_synced:
            try:
                await self._resync()
            except NotFound:
                self._waiting_for = f"the CustomResourceDefinition of {INFERENCE.plural}"
            except ApiError as error:
                self._waiting_for = f"the API server: {error}"
            if not self.watch.is_synced:
                log.warning("waiting for %s", self._waiting_for)
                await self.clock.sleep(pause)
                pause = min(5.0, 2 * pause)
        while True:
            await self.clock.sleep(TICK_SECONDS)
            try:
                await self._tick()
            except ApiError as error:
                log.warning("re-list: %s", error)

    async def _tick(self) -> None:
        now = self.clock.monotonic()
        if self.watches.restart_if_due():
            self.telemetry.count("foveal_operator_watch_restarts")
            # What was missed meanwhile; and an API that has gone is watched no more.
            self._next_resync = min(self._next_resync, now + TICK_SECONDS)
        self._is_doubted |= self.watches.was_refused() or bool(self.watch.closed)
        if self._is_doubted and now >= self._next_question:
            self._next_question = now + self._doubt_seconds
            self._doubt_seconds = QUESTION_SECONDS
            if await self.watch.find_namespaces():
                self._next_resync = now
            self._is_doubted, self._next_question = False, now + QUESTION_SECONDS
            self._doubt_seconds = DOUBT_SECONDS
        if now >= self._next_resync:
            # A resync that fails is not tried at every tick: the others have work to do.
            self._next_resync = now + self._pause_seconds
            self._pause_seconds = min(MAX_RESYNC_PAUSE_SECONDS, 2 * self._pause_seconds)
            await self._resync()
            self._pause_seconds = TICK_SECONDS
        else:
            await self.watch.relist_stale()
        if self.elector is None and now >= self._next_beat:
            self._next_beat = now + SILENT_SECONDS / 3
            await self.cluster.serves(INFERENCE)

    async def _resync(self) -> None:
        """Facts, watches for what the cluster now serves, live lists, and a look at everything."""
        is_first = not self.watch.is_synced
        await self.inventory.refresh()
        await self.watch.find_namespaces()
        await self.watch.find_rights()
        kinds = self.watch.kinds(self.inventory.apis)
        was_served = self._is_served
        self._is_served = await self.cluster.serves(INFERENCE)
        if not self._is_served:
            text = f"the cluster does not serve {INFERENCE.plural} of {INFERENCE.api_version}"
            raise NotFound(f"{text}; install the chart's CustomResourceDefinition", 404)
        follows = (kinds, self.watch.namespaces)
        if is_first or not was_served or follows != self.watches.follows:
            self.watches.start(*follows)
        began = self.clock.monotonic()
        await self.watch.sync(kinds)
        self.reconciler.doubt()
        self._synced_at = began
        kept = (self.caches.uids(kind) for kind in (POD, STATEFUL_SET, JOB))
        self._forget_pods(frozenset().union(*kept))
        pause = self.options.resync_seconds * (1.0 + 0.1 * self.clock.random())
        self._next_resync = self.clock.monotonic() + pause

    # --- what the probes ask ----------------------------------------------------------------
    def live_checks(self) -> dict[str, Callable[[], str]]:
        return {"workers": self._workers_live}

    def ready_checks(self, last_answer: Callable[[], float]) -> dict[str, Callable[[], str]]:
        def api() -> str:
            silent = self.clock.monotonic() - last_answer()
            return "" if silent < SILENT_SECONDS else "the API server does not answer"

        return {
            "synced": lambda: "" if self.watch.is_synced else f"waiting for {self._waiting_for}",
            "watches": self.watches.lookup_failure,
            "api": api,
        }

    def before_scrape(self) -> None:
        self.telemetry.set("foveal_operator_watch_is_up", not self.watches.lookup_failure())
        leading = self.elector is None or self.elector.is_leading
        name = self.options.lease.name if self.options.lease else "none"
        self.telemetry.set("leader_election_master_status", leading, name=name)
        self.telemetry.set(
            "controller_runtime_active_workers", self.queue.core.num_working, controller=CONTROLLER
        )
        self.telemetry.set(
            "workqueue_longest_running_processor_seconds",
            self.queue.longest_running_seconds(),
            name=CONTROLLER,
        )

    def _workers_live(self) -> str:
        seconds = self.queue.longest_running_seconds()
        return "" if seconds < STUCK_SECONDS else f"a pass has run for {seconds:.0f} s"


def exit_at_once() -> None:
    """The lease is lost: another may write at any moment, so nothing of ours may run on."""
    sys.stderr.flush()
    os._exit(1)


async def serve(options: Options) -> None:
    """The whole process, until SIGTERM or SIGINT."""
    # Here, not above: the command line's other users of this package need none of these.
    import aiohttp

    from foveal_operator.kube.cluster import KubeCluster, credentials, load_configuration
    from foveal_operator.kube.kopf_watch import WatchEngine

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    clock, telemetry = Clock(), Telemetry().with_process()
    configuration = await load_configuration(options.kubeconfig, options.context)
    cluster = KubeCluster(
        configuration, telemetry, clock=clock, may_write=lambda: operator.may_write()
    )
    session = aiohttp.ClientSession(auto_decompress=False)
    asker = PodAsker(
        PodProber(aiohttp_fetch(session), clock=clock.monotonic),
        PodEvents(cluster, clock.monotonic),
    )
    reports = Reports(asker.ask, lambda key: operator.queue.add(key))

    def make_watches(kinds: tuple[Kind, ...], namespaces: tuple[str, ...]) -> Watches:
        return WatchEngine(
            kinds,
            namespaces,
            login=lambda: credentials(configuration),
            sink=operator.watch.on_event,
            loop=loop,
            identity=options.identity,
        )

    operator = Operator(
        cluster,
        options,
        telemetry,
        clock=clock,
        observe_pods=reports.observe,
        forget_pods=asker.forget,
        on_lost=exit_at_once,
        make_watches=make_watches,
    )
    # What has been loaded stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_OBJECTS, 20, 20)
    server = ProbeServer(
        telemetry,
        live=operator.live_checks(),
        ready=operator.ready_checks(lambda: cluster.last_answer_seconds),
        before_scrape=operator.before_scrape,
    )
    port = await server.start(options.bind_host, options.bind_port)
    log.info("serving /livez, /readyz and /metrics on port %d", port)
    try:
        await _run_until(stop, operator)
    finally:
        await reports.stop()
        await session.close()
        await server.stop()
        await cluster.close()


async def _run_until(stop: asyncio.Event, operator: Operator) -> None:
    """Raises what ended the operator before it was asked to stop."""
    running = asyncio.create_task(operator.run())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    try:
        running.cancel()
        await operator.stop()
        results = await asyncio.gather(running, return_exceptions=True)
    finally:
        stopping.cancel()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 asked to stop, 1 the lease was lost or a defect, 2 wrong flags."""
    try:
        options = read(argv)
    except UsageError as error:
        print(f"foveal-operator: {error}", file=sys.stderr)
        return 2
    set_up_logs(options.log_format, options.log_level)
    try:
        asyncio.run(serve(options))
    except (ApiError, OSError) as error:
        log.error("%s", error)
        return 1
    log.info("stopped")
    return 0


def process() -> None:
    """The command. Ends without waiting for the watches' threads, which have nothing to save."""
    code = main()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)
