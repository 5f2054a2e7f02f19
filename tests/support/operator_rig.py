"""The operator over a FakeCluster, with everything that a kubelet would do left to the test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from foveal_operator.kube.errors import ApiError
from foveal_operator.kube.kinds import INFERENCE, Kind
from foveal_operator.kube.types import Obj
from foveal_operator.observability import resource_dashboards, resource_rule_groups
from foveal_operator.pods.probes import PodReports
from foveal_operator.process.main import Operator
from foveal_operator.process.options import Options
from foveal_operator.reconcile.observe import Settings
from foveal_operator.telemetry.series import Telemetry
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.fake_clock import FakeTime

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = ("default", "tiny")
OPTIONAL_KINDS = frozenset(
    {"PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute", "InferencePool",
     "ResourceClaimTemplate", "ResourceSlice", "DeviceClass"}
)  # fmt: skip


def resource(**spec: Any) -> Obj:
    """The laptop example, with parts of its spec replaced."""
    body: Obj = yaml.safe_load((EXAMPLES / "mmi-cpu-laptop.yaml").read_text(encoding="utf-8"))
    body["metadata"]["namespace"] = "default"
    body["spec"].update(spec)
    return body


def with_claim(cluster: FakeCluster) -> FakeCluster:
    """The claim with the model, which is the user's."""
    metadata = {"name": "models", "namespace": "default"}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
    cluster.add({**claim, "status": {"phase": "Bound"}})
    return cluster


def default_settings(image: str, version: str = "") -> Settings:
    """As without any flag: the rules and dashboards that are built in."""
    return Settings(
        runtime_image=image,
        version=version,
        rule_groups=resource_rule_groups(),
        dashboards=resource_dashboards(),
    )


class NoEngine:
    """The kit hands events over itself."""

    is_alive = True
    failure = ""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def lookup_silent(self) -> tuple[str, ...]:
        return ()

    def was_refused(self) -> bool:
        return False


class Kit:
    """One replica without leader election; passes are run by `settle`, one worker, no waiting."""

    def __init__(
        self,
        cluster: FakeCluster | None = None,
        *,
        image: str = "foveal/runtime:1",
        version: str = "",
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self.cluster = cluster or with_claim(FakeCluster(missing=OPTIONAL_KINDS))
        self.time = FakeTime()
        self.telemetry = Telemetry()
        self.reports = PodReports()
        self.operator = Operator(
            self.cluster,
            Options(settings=default_settings(image, version), namespaces=namespaces),
            self.telemetry,
            clock=self.time.clock,
            observe_pods=self._observe,
            on_lost=lambda: None,
            make_watches=self._make_watches,
        )
        self.watched: tuple[Kind, ...] = ()
        self.watched_namespaces: tuple[str, ...] = ()
        self.hears = True
        self.cluster.watchers = [self._hear]

    async def _observe(self, *_: Sequence[Obj]) -> PodReports:
        return self.reports

    def _make_watches(self, kinds: tuple[Kind, ...], namespaces: tuple[str, ...]) -> NoEngine:
        self.watched, self.watched_namespaces = kinds, namespaces
        return NoEngine()

    def _hear(self, kind: Kind, change: str, body: Obj) -> None:
        is_near = body["metadata"].get("namespace") in self.watched_namespaces
        if self.hears and kind in self.watched and (is_near or not self.watched_namespaces):
            self.operator.watch.on_event(kind, change, body)

    async def start(self) -> None:
        """What a replica does first."""
        await self.operator._resync()

    async def settle(self, passes: int = 50) -> list[str]:
        """Works on every key that is due until none is. Returns the passes' results."""
        results = []
        queue = self.operator.queue
        for _ in range(passes):
            taken = queue.core.take(self.time.now)
            if taken is None:
                self.operator.reconciler.check_integrity()
                self.operator.caches.check_integrity()
                return results
            results.append(await self.operator.workers.once(taken[0]))
            queue.done(taken[0])
        raise AssertionError(f"not at rest after {passes} passes: {results[-5:]}")

    async def resync(self) -> None:
        await self.operator._resync()
        await self.settle()

    def status(self, name: str = "tiny") -> Obj:
        return self.cluster.body(INFERENCE.name, name)["status"]

    def condition(self, kind: str) -> tuple[str, str]:
        """(status, reason)"""
        for condition in self.status()["conditions"]:
            if condition["type"] == kind:
                return condition["status"], condition["reason"]
        return "", ""

    def fail(self, error: ApiError, **where: str) -> None:
        self.cluster.fail(error, **where)
