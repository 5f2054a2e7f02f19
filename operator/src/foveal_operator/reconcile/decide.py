"""One pass's decision about a resource: model, budgets, objects and rollout.

Asks the API server for free devices only, and only where a rollout's strategy rests on them. Writes
nothing.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from foveal_operator import manifests
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, STATEFUL_SET
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import ObjectKey
from foveal_operator.manifests import ClusterFacts, Desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.manifests.context import Context, content_hash
from foveal_operator.model.flow import ModelDecision, ModelView, decide_model
from foveal_operator.reconcile.baseline import Basis, accelerator_name, placement_of
from foveal_operator.reconcile.inventory import Inventory
from foveal_operator.reconcile.observe import Observation, keep_latest
from foveal_operator.rollout import RolloutDecision, RolloutView, decide, needs_devices, record_name
from foveal_runtime.plan.budget.planner import plan as make_plan
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.profile import ModelProfile

_OF_NODES = ("DeviceMemoryUnknown", "DeviceTooSmall", "NodeMemory")
"""Problems of a plan that other nodes or devices may not have."""


class Decision(Observation, frozen=True, kw_only=True):
    """An observation and what follows from it.

    Attributes:
        basis: what to record with the pods that are asked for.
        plan: None while the model has no profile.
        digests: content hashes of objects in `desired`, as far as known.
    """

    model: ModelDecision
    basis: Basis
    plan: BudgetPlan | None
    desired: Desired
    rollout: RolloutDecision
    digests: dict[ObjectKey, str]

    @property
    def context(self) -> Context:
        return Context(inference=self.inference, plan=self.plan, facts=self.facts)

    @property
    def waits_for_cluster(self) -> bool:
        """It lacks an API, or a node or device that its budgets fit: no watch tells that it has
        come."""
        problems = self.plan.problems if self.plan is not None else ()
        lacks_node = any(problem.reason in _OF_NODES for problem in problems)
        return lacks_node or bool(self.desired.missing_apis)


class _Derived(msgspec.Struct, frozen=True, kw_only=True):
    """What follows from a resource and its model: read it only, it is handed out again. `nodes` are
    the facts that the plan rests on, `digests` content hashes by kind and name."""

    plan: BudgetPlan | None
    nodes: NodeFacts
    desired: Desired
    digests: dict[ObjectKey, str]


class Decider:
    """One per operator."""

    def __init__(self, caches: Caches, inventory: Inventory) -> None:
        self._caches = caches
        self._inventory = inventory
        self._known: OrderedDict[str, tuple[object, _Derived]] = OrderedDict()

    async def decide(self, seen: Observation) -> Decision:
        """What this pass makes of the observation. Where it needs what the cluster is not known to
        have, it looks again. Raises ApiError."""
        found = await self._decide(seen)
        if found.waits_for_cluster and await self._inventory.renew():
            facts = msgspec.structs.replace(seen.facts, apis=self._inventory.apis)
            nodes = self._inventory.node_facts(seen.inference.spec.engine)
            if (facts.apis, nodes) != (seen.facts.apis, seen.nodes):
                seen = msgspec.structs.replace(seen, facts=facts, nodes=nodes)
                return await self._decide(seen)
        return found

    async def _decide(self, seen: Observation) -> Decision:
        inference, accelerator = seen.inference, seen.inference.spec.engine.accelerator
        model = decide_model(
            ModelView(
                inference=inference,
                facts=seen.facts,
                live=seen.model_objects,
                job_pods=seen.model_pods,
                downloads=seen.reports.downloads,
                refused=seen.reports.refused,
                waits=seen.reports.waits,
                now=seen.now,
            )
        )
        facts = msgspec.structs.replace(seen.facts, model_ready=model.model_ready)
        recorded, present = seen.recorded, seen.nodes
        nodes, refusing = present, ""
        if recorded is not None:
            image = inference.spec.image or facts.runtime_image
            refusing, nodes = recorded.refusing_snapshots(image), recorded.nodes(image)
            takes = nodes.takes_snapshots
            present = msgspec.structs.replace(present, takes_snapshots=takes)
            nodes = nodes if recorded.is_about(inference.spec.engine) else present
        derived = self._derived(inference, facts, model.profile, nodes, present)
        return Decision(
            **{**msgspec.structs.asdict(seen), "facts": facts},
            model=model,
            basis=Basis(
                runtime_image=facts.runtime_image,
                accelerator=accelerator_name(accelerator),
                placement=placement_of(inference.spec.engine),
                node_bytes=derived.nodes.node_bytes,
                device_bytes=derived.nodes.device_bytes,
                largest_device_bytes=derived.nodes.largest_device_bytes,
                without_snapshots=refusing,
                key_generation=facts.key_generation or msgspec.UNSET,
            ),
            plan=derived.plan,
            desired=derived.desired,
            digests=derived.digests,
            rollout=await self.rollout(seen, derived.desired),
        )

    def _derived(
        self,
        inference: InferenceSpec,
        facts: ClusterFacts,
        profile: ModelProfile | None,
        nodes: NodeFacts,
        present: NodeFacts,
    ) -> _Derived:
        """The same inputs give what they gave."""
        inputs = (inference, *msgspec.structs.astuple(facts), profile, nodes, present)
        known = self._known.get(inference.uid)
        if known is not None and known[0] == inputs:
            return known[1]
        plan: BudgetPlan | None = None
        if profile is not None:
            plan = make_plan(budget_inputs(inference, nodes), profile)
            if not plan.fits and nodes != present:
                # The nodes of the first day no longer carry it; those of today may.
                fresh = make_plan(budget_inputs(inference, present), profile)
                if fresh.fits:
                    plan, nodes = fresh, present
        desired = manifests.desired(inference, plan, facts)
        digests = {owned.key[::2]: content_hash(owned.body) for owned in desired.objects}
        found = _Derived(plan=plan, nodes=nodes, desired=desired, digests=digests)
        keep_latest(self._known, inference.uid, (inputs, found))
        return found

    def check_integrity(self) -> None:
        """Nobody has changed what was handed out."""
        for _, derived in self._known.values():
            for owned in derived.desired.objects:
                assert content_hash(owned.body) == derived.digests[owned.key[::2]]

    async def with_model(self, work: Decision, profile: ModelProfile, nodes: NodeFacts) -> Decision:
        """The same once the model lies in place and has this profile."""
        plan = make_plan(budget_inputs(work.inference, nodes), profile)
        facts = msgspec.structs.replace(work.facts, model_ready=True)
        desired = manifests.desired(work.inference, plan, facts)
        return msgspec.structs.replace(
            work, facts=facts, plan=plan, desired=desired, digests={},
            rollout=await self.rollout(work, desired),
        )  # fmt: skip

    async def rollout(self, work: Observation, desired: Desired) -> RolloutDecision:
        """The rollout rules' answer to what is known now."""
        spec, key = work.inference.spec, work.key
        view = RolloutView(
            inference=work.inference,
            stateful_set=next(iter(desired.of_kind("StatefulSet")), None),
            deployment=next(iter(desired.of_kind("Deployment")), None),
            live_stateful_set=self._caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine"),
            live_deployment=self._caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend"),
            record=self._caches.get(CONFIG_MAP, key[0], record_name(key[1])),
            engine_pods=work.engine_pods,
            frontend_pods=work.frontend_pods,
            awaiting=work.awaiting,
            sessions=work.reports.sessions,
            load=work.reports.load,
            announced=work.resource.get("status", {}).get("rolloutStrategy", ""),
            refused=work.reports.refused.get(f"StatefulSet/{key[1]}-engine", ""),
            now=work.now,
        )
        if needs_devices(view):
            num_wanted = spec.rollout.max_surge * spec.engine.num_devices
            free = await self._inventory.free_devices(spec.engine, num_wanted)
            view = msgspec.structs.replace(view, free_devices=free)
        return decide(view)
