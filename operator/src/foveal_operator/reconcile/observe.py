"""One pass's view of a resource: everything a decision needs, and the decisions themselves.

Used by the reconciler. Reads the caches and what pods have reported; asks the API server only for a
claim that is not ours and, while a rollout runs, for free devices. Writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from foveal_operator import manifests
from foveal_operator.api.parse import InferenceSpec, parse
from foveal_operator.common.clock import Clock
from foveal_operator.kube.cluster import Cluster
from foveal_operator.kube.kinds import (
    BY_NAME,
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    FIELD_MANAGER,
    POD,
    STATEFUL_SET,
)
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import NamespacedName, Obj
from foveal_operator.manifests import ClusterFacts, Desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.manifests.context import Context
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.manifests.replicas import is_handed_over, live_replicas
from foveal_operator.model.flow import ModelDecision, ModelView, decide_model, model_keys
from foveal_operator.pods.probes import PodReports
from foveal_operator.pods.reports import ObservePods
from foveal_operator.reconcile.baseline import Basis, accelerator_name, basis_name, read_basis
from foveal_operator.reconcile.cluster_facts import Survey
from foveal_operator.reconcile.plan_cache import Planned
from foveal_operator.rollout import RolloutDecision, RolloutView, decide, record_name
from foveal_runtime.plan.budget.planner import plan as make_plan
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.profile import ModelProfile

COMPONENT = "app.kubernetes.io/component"
CLAIM_SECONDS = 300.0
MISSING_CLAIM_SECONDS = 5.0
MAX_CLAIMS = 10_000


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the operator's flags say about resources."""

    runtime_image: str = "foveal/runtime:0.1.0"
    cluster_domain: str = "cluster.local"
    monitoring_namespace: str = "monitoring"
    rule_groups: tuple[Obj, ...] = ()
    dashboards: dict[str, str] = {}


class Pass(msgspec.Struct, kw_only=True):
    """One pass over one resource: what is known so far.

    Attributes:
        digests: content hashes of objects in `desired`, by kind and name, as far as known.
    """

    key: NamespacedName
    resource: Obj
    now: float
    inference: InferenceSpec
    model: ModelDecision
    facts: ClusterFacts
    basis: Basis
    plan: BudgetPlan | None
    desired: Desired
    engine_pods: tuple[Obj, ...]
    frontend_pods: tuple[Obj, ...]
    reports: PodReports = PodReports()
    rollout: RolloutDecision = RolloutDecision()
    digests: dict[tuple[str, str], str] = {}

    @property
    def uid(self) -> str:
        return str(self.resource["metadata"]["uid"])

    @property
    def context(self) -> Context:
        return Context(inference=self.inference, plan=self.plan, facts=self.facts)


class Looker:
    """One per operator."""

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        survey: Survey,
        *,
        clock: Clock,
        settings: Settings,
        observe_pods: ObservePods,
    ) -> None:
        self._cluster = cluster
        self._caches = caches
        self._survey = survey
        self._clock = clock
        self._settings = settings
        self._observe_pods = observe_pods
        self._claims: dict[NamespacedName, tuple[float, Obj | None]] = {}
        self._planned = Planned()

    async def look(self, key: NamespacedName, resource: Obj) -> Pass:
        """Everything a decision needs, and the decision. Raises SpecError."""
        inference = self._planned.parsed(resource, parse)
        now = self._clock.wall().timestamp()
        basis_map = self._caches.get(CONFIG_MAP, key[0], basis_name(key[1]))
        basis = read_basis(basis_map)
        accelerator = inference.spec.engine.accelerator
        present = self._survey.node_facts(accelerator)
        image = basis.runtime_image if basis else self._settings.runtime_image
        generation = (basis.key_generation or "") if basis else ""
        facts = self._facts(key, inference, image, generation)
        pods = {role: self.pods(key, role) for role in ("engine", "frontend", "model")}
        reports = await self._observe_pods(pods["engine"], pods["frontend"], pods["model"])
        model = await self._model(key, inference, facts, reports, pods["model"])
        facts = msgspec.structs.replace(facts, model_ready=model.model_ready)
        nodes = basis.nodes if basis and basis.is_about(accelerator) else present
        derived = self._planned.derived(
            inference,
            facts,
            model.profile,
            (nodes, present),
            lambda: _derive(inference, facts, model.profile, nodes, present),
        )
        nodes = derived.nodes
        work = Pass(
            key=key,
            resource=resource,
            now=now,
            inference=inference,
            model=model,
            facts=facts,
            basis=Basis(
                runtime_image=image,
                accelerator=accelerator_name(accelerator),
                node_bytes=nodes.node_bytes,
                device_bytes=nodes.device_bytes,
                key_generation=generation or msgspec.UNSET,
            ),
            plan=derived.plan,
            desired=derived.desired,
            digests=derived.digests,
            engine_pods=pods["engine"],
            frontend_pods=pods["frontend"],
            reports=reports,
        )
        work.rollout = await self.decide(work)
        return work

    def _facts(
        self, key: NamespacedName, inference: InferenceSpec, image: str, key_generation: str
    ) -> ClusterFacts:
        settings, spec = self._settings, inference.spec
        engines = self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine")
        frontends = self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend")
        return ClusterFacts(
            runtime_image=image,
            apis=self._survey.apis,
            live_frontends=live_replicas(frontends) if spec.frontend.autoscaling else None,
            live_engines=live_replicas(engines) if spec.engine.autoscaling else None,
            frontends_handed_over=is_handed_over(frontends, FIELD_MANAGER),
            engines_handed_over=is_handed_over(engines, FIELD_MANAGER),
            monitoring_namespace=settings.monitoring_namespace,
            cluster_domain=settings.cluster_domain,
            key_generation=key_generation,
            rule_groups=settings.rule_groups,
            dashboards=settings.dashboards,
        )

    async def _model(
        self,
        key: NamespacedName,
        inference: InferenceSpec,
        facts: ClusterFacts,
        reports: PodReports,
        job_pods: tuple[Obj, ...],
    ) -> ModelDecision:
        live: dict[tuple[str, str], Obj] = {}
        for kind, name in model_keys(inference, facts):
            body = self._caches.get(BY_NAME[kind], key[0], name)
            if body is None and kind == CLAIM.name:
                body = await self._foreign_claim(key[0], name)
            if body is not None:
                live[kind, name] = body
        view = ModelView(
            inference=inference,
            facts=facts,
            live=live,
            job_pods=job_pods,
            downloads=reports.downloads,
            now=self._clock.wall().timestamp(),
        )
        return decide_model(view)

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

    def check_integrity(self) -> None:
        self._planned.check_integrity()

    def pods(self, key: NamespacedName, component: str) -> tuple[Obj, ...]:
        """Pods of a role that are not finished (Jobs: all)."""
        return tuple(
            pod
            for pod in self._caches.owned(POD, key)
            if pod["metadata"].get("labels", {}).get(COMPONENT) == component
            and (
                component == "model"
                or pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")
            )
        )

    async def decide(self, work: Pass) -> RolloutDecision:
        """The rollout rules' answer to what is known now."""
        spec, key = work.inference.spec, work.key
        wanted = work.desired.of_kind("StatefulSet")
        free = None
        if wanted and _is_rolling(wanted[0], work.engine_pods):
            free = await self._survey.free_devices(spec.engine.accelerator)
        return decide(
            RolloutView(
                inference=work.inference,
                stateful_set=next(iter(wanted), None),
                deployment=next(iter(work.desired.of_kind("Deployment")), None),
                live_stateful_set=self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine"),
                live_deployment=self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend"),
                record=self._caches.get(CONFIG_MAP, key[0], record_name(key[1])),
                engine_pods=work.engine_pods,
                frontend_pods=work.frontend_pods,
                free_devices=free,
                sessions=work.reports.sessions,
                load=work.reports.load,
                announced=work.resource.get("status", {}).get("rolloutStrategy", ""),
                now=work.now,
            )
        )


def _derive(
    inference: InferenceSpec,
    facts: ClusterFacts,
    profile: ModelProfile | None,
    nodes: NodeFacts,
    present: NodeFacts,
) -> tuple[BudgetPlan | None, NodeFacts, Desired]:
    """The plan, the node facts that it rests on, and every object."""
    plan: BudgetPlan | None = None
    if profile is not None:
        plan = make_plan(budget_inputs(inference, nodes), profile)
        if not plan.fits and nodes != present:
            # The nodes of the first day no longer carry it; those of today may.
            fresh = make_plan(budget_inputs(inference, present), profile)
            if fresh.fits:
                plan, nodes = fresh, present
    return plan, nodes, manifests.desired(inference, plan, facts)


def _is_rolling(wanted: Obj, pods: Sequence[Obj]) -> bool:
    revision = wanted["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
    return any(pod["metadata"].get("labels", {}).get(REVISION_LABEL) != revision for pod in pods)
