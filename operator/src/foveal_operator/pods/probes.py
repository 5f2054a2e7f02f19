"""Probes of pods over HTTP: sessions, cache sizes, memory. Bounded, never an error.

Called by the reconciler; one PodProber lives as long as the operator and asks no pod more often
than its interval. A pod that does not answer in time is unknown; what it said before is forgotten
after a few intervals. metrics.py interprets the figures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import aiohttp
import msgspec

from foveal_operator.kube.types import Obj, label_of
from foveal_operator.manifests.pods import PROGRESS_PORT_NAME, SESSION_GROUP_LABEL
from foveal_operator.pods.diagnose import NEW_SECONDS, is_ready
from foveal_operator.pods.metrics import Figures, History, PodReports, Seen, read_figures, report

Fetch = Callable[[str, float], Awaitable[str]]
"""(url, timeout in seconds) -> body. Raises OSError, TimeoutError or ValueError."""
MAX_BODY_BYTES = 4 << 20
INTERVAL_SECONDS = 15.0
"""No pod is asked again sooner, whether it answered or not, but for new ones."""
NEW_INTERVAL_SECONDS = 3.0
"""Of new ones: Ready waits for their sessions."""
TIMEOUT_SECONDS = 2.0
FORGET_INTERVALS = 4

__all__ = ["Fetch", "PodProber", "PodReports", "aiohttp_fetch"]


class _Known(msgspec.Struct):
    """One pod's last answers."""

    asked_at: float = float("-inf")
    answered_at: float = float("-inf")
    ready_at: float | None = None
    figures: Figures = Figures()
    history: History = msgspec.field(default_factory=History)


def aiohttp_fetch(session: aiohttp.ClientSession) -> Fetch:
    """The real thing. Answers other than 200, too long or not text are a ValueError."""

    async def fetch(url: str, timeout_seconds: float) -> str:
        limit = aiohttp.ClientTimeout(total=timeout_seconds)
        try:
            async with session.get(url, timeout=limit, allow_redirects=False) as answer:
                body = await answer.content.read(MAX_BODY_BYTES + 1)
                while len(body) <= MAX_BODY_BYTES and not answer.content.at_eof():
                    body += await answer.content.read(MAX_BODY_BYTES + 1 - len(body))
                if answer.status != 200 or len(body) > MAX_BODY_BYTES:
                    raise ValueError(f"{url}: status {answer.status}, {len(body)} bytes")
                return body.decode()
        except aiohttp.ClientError as error:
            raise OSError(str(error)) from error

    return fetch


class PodProber:
    """Asks pods' /metrics, a bounded number at a time.

    Args:
        fetch: the seam; `aiohttp_fetch(session)` in the operator, a fake in tests.
        clock: monotonic seconds.
        max_in_flight: requests at a time, over all resources.
    """

    def __init__(
        self,
        fetch: Fetch,
        *,
        clock: Callable[[], float],
        max_in_flight: int = 16,
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._slots = asyncio.Semaphore(max_in_flight)
        self._known: dict[str, _Known] = {}

    async def observe_pods(
        self,
        engine_pods: Sequence[Obj],
        frontend_pods: Sequence[Obj],
        job_pods: Sequence[Obj] = (),
    ) -> PodReports:
        """The latest answers of these pods, at most INTERVAL_SECONDS old. Never raises."""
        pods = [*engine_pods, *frontend_pods, *job_pods]
        await asyncio.gather(*(self._ask(pod) for pod in pods))
        return report(self._seen(engine_pods), self._seen(frontend_pods), self._seen(job_pods))

    def forget(self, keep_uids: Iterable[str]) -> None:
        """Drops what is kept of all pods but these; call it after a full listing."""
        kept = set(keep_uids)
        self._known = {uid: known for uid, known in self._known.items() if uid in kept}

    def _seen(self, pods: Sequence[Obj]) -> list[Seen]:
        found = []
        oldest = self._clock() - FORGET_INTERVALS * INTERVAL_SECONDS
        for pod in pods:
            metadata = pod["metadata"]
            known = self._known.get(metadata.get("uid", ""))
            fresh = known is not None and known.answered_at >= oldest
            found.append(
                Seen(
                    pod=metadata["name"],
                    group=label_of(pod, SESSION_GROUP_LABEL),
                    is_ready=is_ready(pod),
                    figures=known.figures if known and fresh else None,
                    history=known.history if known and fresh else None,
                )
            )
        return found

    async def _ask(self, pod: Obj) -> None:
        uid, url = pod["metadata"].get("uid", ""), metrics_url(pod)
        if not uid or url is None:
            return
        known, now = self._known.setdefault(uid, _Known()), self._clock()
        if not is_ready(pod):
            known.ready_at = None
        elif known.ready_at is None:
            known.ready_at = now
        is_new = known.ready_at is not None and now - known.ready_at < NEW_SECONDS
        if now - known.asked_at < (NEW_INTERVAL_SECONDS if is_new else INTERVAL_SECONDS):
            return
        known.asked_at = now
        try:
            async with self._slots:
                text = await asyncio.wait_for(self._fetch(url, TIMEOUT_SECONDS), TIMEOUT_SECONDS)
            figures = read_figures(text)
        except (OSError, TimeoutError, ValueError):
            return
        known.answered_at, known.figures = self._clock(), figures
        known.history.add(known.answered_at, figures)


def metrics_url(pod: Obj) -> str | None:
    """Where the pod answers; None while nothing of it runs."""
    address = pod.get("status", {}).get("podIP")
    if not address or pod.get("status", {}).get("phase", "Running") != "Running":
        return None
    for container in pod.get("spec", {}).get("containers", ()):
        for port in container.get("ports", ()):
            if port.get("name") in ("http", PROGRESS_PORT_NAME):
                host = f"[{address}]" if ":" in address else address
                return f"http://{host}:{port['containerPort']}/metrics"
    return None
