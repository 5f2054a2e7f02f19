"""A cluster small enough to simulate: one StatefulSet, one Deployment, pods, devices, trouble.

The two controllers do what Kubernetes' do, as far as a rollout can tell: OnDelete and parallel pod
management here; maxSurge, maxUnavailable and minReadySeconds there. Time goes in ticks.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import Desired
from foveal_operator.manifests.pods import REVISION_LABEL, SESSION_GROUP_LABEL
from foveal_operator.rollout import RolloutDecision, RolloutView, decide
from foveal_operator.rollout.steps import is_held
from tests.support.regenerate import wanted
from tests.support.samples import resource

TICK_SECONDS = 5.0
START = 1_700_000_000.0
DEADLINE_SECONDS = 600
GATED = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
QUOTA_EXCEEDED = 'pods "qwen-engine-2" is forbidden: exceeded quota: q, requested: pods=1'


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""

    image: str = "good-1"
    engines: int = 2
    frontends: int = 2
    engine_note: str = ""
    """Changes the engine template alone."""
    frontend_note: str = ""
    strategy: str = "Auto"
    max_unavailable: int = 1
    paused: bool = False
    auto_rollback: bool = True
    deadline: int = DEADLINE_SECONDS


@functools.cache
def resource_of(wish: Wish) -> Obj:
    def note(text: str) -> Obj:
        return {"metadata": {"annotations": {"note": text}}} if text else {}

    spec: dict[str, Any] = {
        "image": f"registry.example/{wish.image}",
        "engine": {"replicas": wish.engines, "podTemplate": note(wish.engine_note)},
        "frontend": {"replicas": wish.frontends, "podTemplate": note(wish.frontend_note)},
        "rollout": {
            "strategy": wish.strategy,
            "maxUnavailable": wish.max_unavailable,
            "progressDeadlineSeconds": wish.deadline,
            "autoRollback": wish.auto_rollback,
        },
        "paused": wish.paused,
    }
    return resource(**spec)


@functools.cache
def desired_of(wish: Wish) -> tuple[InferenceSpec, Desired]:
    return parse(resource_of(wish)), wanted(resource_of(wish))


@dataclass
class SimPod:
    """One pod; `born` in ticks."""

    name: str
    uid: str
    role: str
    template: Obj
    born: float
    starts_in: int
    admitted: bool = True
    placed: bool = False
    started: bool = False
    ready: bool = False
    crashed_for: int = 0
    ends_in: int | None = None

    @property
    def revision(self) -> str:
        return str(self.template["metadata"]["labels"][REVISION_LABEL])

    @property
    def group(self) -> str:
        return str(self.template["metadata"]["labels"][SESSION_GROUP_LABEL])

    @property
    def is_bad(self) -> bool:
        container = self.template["spec"]["containers"][0]
        return "bad" in container["image"] + str(self.template["metadata"].get("annotations"))

    def raw(self) -> Obj:
        created = datetime.fromtimestamp(self.born, UTC).isoformat()
        metadata: Obj = {
            "name": self.name,
            "uid": self.uid,
            "creationTimestamp": created,
            "labels": self.template["metadata"]["labels"],
        }
        if self.ends_in is not None:
            metadata["deletionTimestamp"] = created
        conditions: list[Obj] = [{"type": "Ready", "status": str(self.ready)}]
        state: Obj = {}
        if not self.admitted:
            conditions.append({"type": "PodScheduled", "reason": "SchedulingGated"})
        elif not self.placed:
            conditions.append({"type": "PodScheduled", "reason": "Unschedulable"})
        elif self.is_bad:
            state = {"waiting": {"reason": "ErrImagePull"}}
        elif self.crashed_for:
            state = {"terminated": {"exitCode": 1}}
        statuses = [{"name": self.role, "state": state}]
        return {
            "metadata": metadata,
            "spec": self.template["spec"] if self.admitted else {**self.template["spec"], **GATED},
            "status": {"conditions": conditions, "containerStatuses": statuses},
        }


@dataclass
class SimCluster:
    """The API objects, the controllers and the nodes."""

    random: random.Random
    num_devices: int
    wish: Wish = field(default_factory=Wish)
    now: float = START
    generation: int = 1
    stateful_set: Obj | None = None
    deployment: Obj | None = None
    record: Obj | None = None
    announced: str = ""
    pods: dict[str, SimPod] = field(default_factory=dict)
    count: int = 0
    knows_devices: bool = True
    quota: int = 99
    """Engines that the namespace may have."""
    is_queue: bool = False
    """More of them are created, and wait in a queue; without it they are refused."""
    refusal: str = QUOTA_EXCEEDED
    events: list[str] = field(default_factory=list)
    refused: str = ""

    # what others see

    def role(self, role: str) -> list[SimPod]:
        return [pod for pod in self.pods.values() if pod.role == role]

    def serving_engines(self) -> list[SimPod]:
        """As a client would find out: ready, and some ready frontend understands it."""
        groups = {pod.group for pod in self.role("frontend") if pod.ready and pod.ends_in is None}
        return [
            pod
            for pod in self.role("engine")
            if pod.ready and pod.ends_in is None and pod.group in groups
        ]

    def free_devices(self) -> int:
        return self.num_devices - sum(1 for pod in self.role("engine") if pod.placed)

    def view(self) -> RolloutView:
        inference, objects = desired_of(self.wish)
        inference = msgspec.structs.replace(inference, generation=self.generation)
        sessions = {}
        for pod in self.role("engine"):
            if pod.ready and self.random.random() < 0.7:
                mine = [f for f in self.role("frontend") if f.started and f.group == pod.group]
                sessions[pod.name] = len(mine)
        return RolloutView(
            inference=inference,
            stateful_set=objects.of_kind("StatefulSet")[0],
            deployment=objects.of_kind("Deployment")[0],
            live_stateful_set=self.stateful_set,
            live_deployment=self.deployment,
            record=self.record,
            engine_pods=tuple(pod.raw() for pod in self.role("engine")),
            frontend_pods=tuple(pod.raw() for pod in self.role("frontend")),
            free_devices=self.free_devices() if self.knows_devices else None,
            sessions=sessions,
            announced=self.announced,
            refused=self.refused,
            now=self.now,
        )

    # the operator's acts

    def reconcile(self, max_writes: int = 99) -> RolloutDecision:
        """One pass; an operator that dies has done only the first `max_writes` writes."""
        decision = decide(self.view())
        for kind, body in (
            ("record", decision.record),
            ("stateful_set", decision.stateful_set),
            ("deployment", decision.deployment),
        ):
            if body is not None and max_writes > 0:
                max_writes -= self._apply(kind, body)
        for name, uid in decision.delete_pods:
            pod = self.pods.get(name)
            if max_writes > 0 and pod is not None and pod.uid == uid:
                max_writes -= 1
                self.events.append(f"delete {name} {pod.revision}")
                self._terminate(pod)
        if max_writes > 0:
            self.announced = decision.strategy
        return decision

    def _apply(self, kind: str, body: Obj) -> int:
        live: Obj | None = getattr(self, kind)
        metadata, status = {**body["metadata"], "generation": 1}, {}
        merged = {**body, "metadata": metadata, "status": status}
        if live is not None:
            metadata["generation"] = live["metadata"]["generation"]
            merged["status"] = live["status"]
            if kind != "record" and "replicas" not in merged["spec"]:
                merged["spec"] = {**merged["spec"], "replicas": live["spec"]["replicas"]}
            if merged.get("spec") != live.get("spec"):
                metadata["generation"] += 1
        if merged == live:
            return 0
        setattr(self, kind, merged)
        return 1

    def ask(self, wish: Wish) -> None:
        self.wish = wish
        self.generation += 1

    # the controllers and the nodes

    def tick(self, trouble: float = 0.0) -> None:
        self.now += TICK_SECONDS
        if self.random.random() < 0.8:
            self._run_stateful_set()
        if self.random.random() < 0.8:
            self._run_deployment()
        for pod in list(self.pods.values()):
            self._run_pod(pod, trouble)
        self._run_readiness()

    def _create(self, role: str, name: str, template: Obj) -> None:
        self.count += 1
        starts_in = self.random.randint(1, 6 if role == "engine" else 3)
        self.pods[name] = SimPod(name, f"uid-{self.count}", role, template, self.now, starts_in)

    def _terminate(self, pod: SimPod) -> None:
        if pod.ends_in is None:
            pod.ends_in = self.random.randint(1, 4)

    def _run_stateful_set(self) -> None:
        workload = self.stateful_set
        if workload is None:
            return
        workload["status"]["observedGeneration"] = workload["metadata"]["generation"]
        replicas = workload["spec"]["replicas"]
        for ordinal in range(replicas):
            name = f"{workload['metadata']['name']}-{ordinal}"
            if name in self.pods:
                continue
            is_full = len(self.role("engine")) >= self.quota
            if is_full and not self.is_queue:
                self.refused = self.refusal
                continue
            self._create("engine", name, workload["spec"]["template"])
            self.pods[name].admitted = not self.is_queue
        for pod in self.role("engine"):
            if int(pod.name.rpartition("-")[2]) >= replicas:
                self._terminate(pod)

    def _run_deployment(self) -> None:
        workload = self.deployment
        if workload is None:
            return
        spec = workload["spec"]
        replicas, template = spec["replicas"], spec["template"]
        rolling = spec["strategy"]["rollingUpdate"]
        surge, unavailable = rolling["maxSurge"], rolling["maxUnavailable"]
        if surge == "25%":
            surge = -(-replicas // 4)
        assert surge or unavailable or not replicas, "the API server refuses 0 and 0"
        revision = template["metadata"]["labels"][REVISION_LABEL]
        live = [pod for pod in self.role("frontend") if pod.ends_in is None]
        new = [pod for pod in live if pod.revision == revision]
        old = [pod for pod in live if pod.revision != revision]
        for _ in range(min(replicas - len(new), replicas + surge - len(live))):
            self._create("frontend", f"frontend-{self.count}", template)
        for pod in new[replicas:]:
            self._terminate(pod)
        is_available = {
            pod.name: pod.ready and not (pod.revision == revision and is_held(workload))
            for pod in live
        }
        num_new_unavailable = sum(1 for pod in new if not is_available[pod.name])
        floor = replicas - unavailable
        spare = len(live) - floor - num_new_unavailable
        for pod in [pod for pod in old if not pod.ready][: max(0, spare)]:
            self._terminate(pod)
        spare = sum(is_available.values()) - floor
        for pod in [pod for pod in old if pod.ready][: max(0, spare)]:
            self._terminate(pod)

    def _run_pod(self, pod: SimPod, trouble: float) -> None:
        if pod.ends_in is not None:
            pod.ends_in -= 1
            if pod.ends_in < 0:
                del self.pods[pod.name]
            return
        if self.random.random() < trouble:
            if self.random.random() < 0.3:
                del self.pods[pod.name]
                return
            pod.crashed_for, pod.started = self.random.randint(1, 4), False
        if not pod.admitted:
            admitted = sum(1 for one in self.role("engine") if one.admitted)
            pod.admitted = admitted < self.quota
        elif not pod.placed:
            pod.placed = pod.role == "frontend" or self.free_devices() > 0
        elif pod.crashed_for:
            pod.crashed_for -= 1
        elif not pod.is_bad:
            pod.starts_in -= 1
            pod.started = pod.starts_in <= 0

    def _run_readiness(self) -> None:
        for pod in self.role("engine"):
            pod.ready = pod.started and pod.ends_in is None
        groups = {pod.group for pod in self.role("engine") if pod.started}
        for pod in self.role("frontend"):
            pod.ready = pod.started and pod.ends_in is None and pod.group in groups
