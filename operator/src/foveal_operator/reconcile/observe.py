"""One pass's observation of a resource: everything that a decision needs.

Used by the reconciler. Reads the caches and what pods have reported; asks the API server only for a
claim that is not ours, and for what should be in the caches and is not. Writes nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import msgspec

from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import ClusterReader
from foveal_operator.kube.kinds import (
    BY_NAME,
    CLAIM,
    CLAIM_TEMPLATE,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    POD,
    STATEFUL_SET,
    Kind,
)
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName, Obj, ObjectKey, label_of, phase_of
from foveal_operator.manifests import ClusterFacts
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.manifests.network import frontend_ports
from foveal_operator.manifests.workloads import (
    UNHASHED_DEVICES,
    is_handed_over,
    live_replicas,
)
from foveal_operator.model.flow import model_keys
from foveal_operator.pods.probes import PodReports
from foveal_operator.pods.reports import ObservePods
from foveal_operator.reconcile.apply import controller_of, is_controlled_by
from foveal_operator.reconcile.baseline import Basis, basis_name, read_basis
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.rollout import objects_in_use, read_record, record_name

COMPONENT = "app.kubernetes.io/component"
CLAIM_SECONDS = 300.0
MISSING_CLAIM_SECONDS = 5.0
MAX_CLAIMS = 10_000
MAX_KEPT = 32
V = TypeVar("V")


def keep_latest(memory: OrderedDict[str, V], uid: str, value: V) -> None:
    """Of the MAX_KEPT resources looked at most recently; forgetting one costs a millisecond."""
    memory.pop(uid, None)
    memory[uid] = value
    if len(memory) > MAX_KEPT:
        memory.popitem(last=False)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator's flags say about resources."""

    runtime_image: str = "foveal/runtime:0.1.0"
    cluster_domain: str = "cluster.local"
    monitoring_namespace: str = "monitoring"
    operator_namespace: str = ""
    version: str = ""
    rule_groups: tuple[Obj, ...] = ()
    dashboards: dict[str, str] = {}


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """What one pass over a resource starts from.

    Attributes:
        facts: of the cluster; a decision adds whether the model is ready.
        recorded: the basis that the resource's pods were planned with; None before its first pods.
        nodes: what the nodes of today have.
        awaiting: pods that wait for a node that is not there yet.
        model_objects: live objects that the model's preparation uses, by (kind, name).
        short: StatefulSet and Jobs that lack pods, and do not say why. A Deployment does.
        failed_pods: engines and frontends that have ended: of no use but to say why.
    """

    key: NamespacedName
    resource: Obj
    now: float
    inference: InferenceSpec
    facts: ClusterFacts
    recorded: Basis | None
    nodes: NodeFacts
    model_objects: dict[ObjectKey, Obj]
    engine_pods: tuple[Obj, ...]
    frontend_pods: tuple[Obj, ...]
    model_pods: tuple[Obj, ...]
    failed_pods: tuple[Obj, ...] = ()
    reports: PodReports = PodReports()
    short: tuple[Obj, ...] = ()
    awaiting: frozenset[str] = frozenset()

    @property
    def serving_pods(self) -> tuple[Obj, ...]:
        return (*self.engine_pods, *self.frontend_pods)

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])


class Observer:
    """One per operator."""

    def __init__(
        self,
        cluster: ClusterReader,
        caches: Caches,
        inventory: Inventory,
        *,
        clock: Clock,
        settings: Settings,
        observe_pods: ObservePods,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._inventory = inventory
        self._parsed: OrderedDict[str, tuple[object, InferenceSpec]] = OrderedDict()
        self._clock = clock
        self._settings = settings
        self._observe_pods = observe_pods
        self._claims: dict[NamespacedName, tuple[float, Obj | None]] = {}

    async def observe(self, key: NamespacedName, resource: Obj) -> Observation:
        """Everything a decision needs but free devices. Raises SpecError."""
        inference, uid = self._parse(resource), resource["metadata"]["uid"]
        had_workload = bool((resource.get("status", {}).get("engine") or {}).get("workload"))
        has_begun = await self._find_lost(key, uid, had_workload)
        recorded = read_basis(self._caches.get(CONFIG_MAP, key[0], basis_name(key[1])))
        image = recorded.runtime_image if recorded else self._settings.runtime_image
        generation = (recorded.key_generation or "") if recorded else ""
        pods = {role: self.pods(key, role) for role in ("engine", "frontend", "model")}
        devices = await self._unhashed_devices(key, uid, pods["engine"])
        facts = self._facts(key, inference, image, generation, devices, pods["frontend"])
        short = self._short(key, uid, pods)
        reports = await self._observe_pods(pods["engine"], pods["frontend"], pods["model"], short)
        return Observation(
            key=key,
            resource=resource,
            now=self._clock.wall().timestamp(),
            inference=inference,
            facts=facts,
            recorded=recorded,
            nodes=self._inventory.node_facts(inference.spec.engine),
            awaiting=await self._inventory.awaiting(
                inference.spec.engine, pods["engine"], pods["frontend"]
            ),
            model_objects=await self._model_objects(
                key, inference, facts, uid if has_begun else ""
            ),
            engine_pods=pods["engine"],
            frontend_pods=pods["frontend"],
            model_pods=pods["model"],
            failed_pods=self._failed_pods(key),
            reports=reports,
            short=short,
        )

    def _parse(self, resource: Obj) -> InferenceSpec:
        """Kept for as long as the resource is the same: a pass per event of a pod would otherwise
        parse it again and again. Raises SpecError."""
        metadata = resource["metadata"]
        who = [metadata.get(key) for key in ("namespace", "name", "generation")]
        inputs = (who, resource.get("apiVersion"), resource.get("kind"), resource.get("spec"))
        known = self._parsed.get(metadata["uid"])
        if known is None or known[0] != inputs:
            known = (inputs, parse(resource))
            keep_latest(self._parsed, metadata["uid"], known)
        return known[1]

    def _short(
        self, key: NamespacedName, uid: str, pods: dict[str, tuple[Obj, ...]]
    ) -> tuple[Obj, ...]:
        engines = self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine")
        found = [engines] if engines and len(pods["engine"]) < (live_replicas(engines) or 0) else []
        found += [
            job
            for job in self._caches.owned(JOB, key)
            if not job.get("spec", {}).get("suspend")
            and not any(
                one.get("status") == "True" for one in job.get("status", {}).get("conditions") or ()
            )
            and not any(controller_of(pod).get("name") == job["metadata"]["name"]
                        for pod in pods["model"])
        ]  # fmt: skip
        return tuple(body for body in found if is_controlled_by(body, uid))

    def _facts(
        self,
        key: NamespacedName,
        inference: InferenceSpec,
        image: str,
        key_generation: str,
        unhashed_devices: Obj,
        frontend_pods: tuple[Obj, ...],
    ) -> ClusterFacts:
        settings, spec = self._settings, inference.spec
        engines = self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine")
        frontends = self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend")
        return ClusterFacts(
            runtime_image=image,
            apis=self._inventory.apis,
            live_frontends=live_replicas(frontends) if spec.frontend.autoscaling else None,
            live_engines=live_replicas(engines) if spec.engine.autoscaling else None,
            frontends_handed_over=is_handed_over(frontends),
            engines_handed_over=is_handed_over(engines),
            monitoring_namespace=settings.monitoring_namespace,
            operator_namespace=settings.operator_namespace,
            cluster_domain=settings.cluster_domain,
            frontend_ports=frontend_ports(
                (*([frontends["spec"]["template"]] if frontends else ()), *frontend_pods)
            ),
            key_generation=key_generation,
            unhashed_devices=unhashed_devices,
            rule_groups=settings.rule_groups,
            dashboards=settings.dashboards,
        )

    async def _find_lost(self, key: NamespacedName, uid: str, had_workload: bool) -> bool:
        """Takes into the caches what decisions rest on and the watches do not see: they select by
        a label, which anybody may change. False while the resource has no workloads yet, in the
        caches or by its status; then nothing is asked for. Raises ApiError."""
        namespace, name = key
        found = (
            (CONFIG_MAP, basis_name(name)),
            (CONFIG_MAP, record_name(name)),
            (STATEFUL_SET, f"{name}-engine"),
            (DEPLOYMENT, f"{name}-frontend"),
        )
        has_begun = (
            any(self._caches.identity(kind, namespace, one) for kind, one in found)
            or self.pods(key, "engine")
            or self.pods(key, "frontend")
            or had_workload
        )
        if not has_begun:
            return False
        for kind, one in found:
            await self._find(kind, namespace, one, uid)
        return True

    async def _unhashed_devices(
        self, key: NamespacedName, uid: str, engine_pods: tuple[Obj, ...]
    ) -> Obj:
        """As ClusterFacts says. Raises ApiError."""
        engines = self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine")
        name = f"{key[1]}-{UNHASHED_DEVICES}"
        good = read_record(self._caches.get(CONFIG_MAP, key[0], record_name(key[1]))).good
        users = [
            *([engines["spec"]["template"]] if engines else ()),
            *([good.engine] if good else ()),
            *engine_pods,
        ]
        if (CLAIM_TEMPLATE.name, name) not in objects_in_use(users):
            return {}
        await self._find(CLAIM_TEMPLATE, key[0], name, uid)
        live = self._caches.get(CLAIM_TEMPLATE, key[0], name)
        return live["spec"] if live and is_controlled_by(live, uid) else {}

    async def _find(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        """What the caches lack is read live, by the right to list; another's is left out."""
        if self._caches.identity(kind, namespace, name) is not None:
            return
        mark = self._caches.mark
        for body in await self._cluster.list_all(kind, namespace, fields=f"metadata.name={name}"):
            if is_controlled_by(body, uid):
                self._caches.put(kind, body, mark)

    async def _model_objects(
        self, key: NamespacedName, inference: InferenceSpec, facts: ClusterFacts, lost_of: str
    ) -> dict[ObjectKey, Obj]:
        """`lost_of`: uid of the resource once it has workloads, so that records are looked for."""
        live: dict[ObjectKey, Obj] = {}
        for kind, name in model_keys(inference, facts):
            if lost_of and kind == CONFIG_MAP.name:
                await self._find(CONFIG_MAP, key[0], name, lost_of)
            body = self._caches.get(BY_NAME[kind], key[0], name)
            if body is None and kind == CLAIM.name:
                body = await self._foreign_claim(key[0], name)
            if body is not None:
                live[kind, name] = body
        return live

    async def _foreign_claim(self, namespace: str, name: str) -> Obj | None:
        """A claim that is the user's, not ours: not watched, so asked for now and then."""
        now = self._clock.monotonic()
        until, body = self._claims.get((namespace, name), (0.0, None))
        if now >= until:
            body = await self._cluster.get(CLAIM, namespace, name)
            seconds = CLAIM_SECONDS if body else MISSING_CLAIM_SECONDS
            while len(self._claims) >= MAX_CLAIMS:
                del self._claims[next(iter(self._claims))]
            self._claims[namespace, name] = (now + seconds, body)
        return body

    def pods(self, key: NamespacedName, component: str) -> tuple[Obj, ...]:
        """Pods of a role that are not finished (Jobs: all)."""
        return tuple(
            pod
            for pod in self._all_pods(key, component)
            if component == "model" or phase_of(pod) not in ("Succeeded", "Failed")
        )

    def _failed_pods(self, key: NamespacedName) -> tuple[Obj, ...]:
        every = (*self._all_pods(key, "engine"), *self._all_pods(key, "frontend"))
        return tuple(pod for pod in every if phase_of(pod) == "Failed")

    def _all_pods(self, key: NamespacedName, component: str) -> tuple[Obj, ...]:
        return tuple(
            pod
            for pod in self._caches.owned(POD, key)
            if label_of(pod, COMPONENT) == component
            and _may_be_ours(pod, f"{key[1]}-{component}", component)
        )


def _may_be_ours(pod: Obj, workload: str, component: str) -> bool:
    """Labels can be copied. Pods without a controller are adopted by the one whose labels they
    carry."""
    controller = controller_of(pod)
    kind, name = controller.get("kind"), str(controller.get("name"))
    if component == "engine":
        return not controller or (kind, name) == ("StatefulSet", workload)
    if component == "frontend":
        is_its = kind == "ReplicaSet" and name.rpartition("-")[0] == workload
        return not controller or is_its
    return not controller or kind == "Job"
