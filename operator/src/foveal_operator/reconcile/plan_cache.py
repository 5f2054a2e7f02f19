"""Cache of derived plans: kept for as long as what they were derived from is the same.

Used by observe.py: a pass per event of a pod would otherwise derive the same objects again and
again. Holds the resources looked at most recently; forgetting one costs a millisecond, no more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import msgspec

from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.types import Obj, ObjectKey
from foveal_operator.manifests import ClusterFacts, Desired
from foveal_operator.manifests.budget_inputs import NodeFacts
from foveal_operator.manifests.context import content_hash
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.profile import ModelProfile

V = TypeVar("V")
MAX_RESOURCES = 32


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome: read it only, it is handed out again.

    Attributes:
        nodes: the node facts that the plan rests on.
        digests: content hash of each object, by kind and name.
    """

    plan: BudgetPlan | None
    nodes: NodeFacts
    desired: Desired
    digests: dict[ObjectKey, str]


class Planned:
    """One for all resources."""

    def __init__(self) -> None:
        self._parsed: OrderedDict[str, tuple[object, InferenceSpec]] = OrderedDict()
        self._derived: OrderedDict[str, tuple[object, Derived]] = OrderedDict()

    def parsed(self, resource: Obj, parse: Callable[[Obj], InferenceSpec]) -> InferenceSpec:
        """The typed resource. Raises what `parse` raises."""
        metadata = resource["metadata"]
        uid = metadata.get("uid") or ""
        who = [metadata.get(key) for key in ("namespace", "name", "generation")]
        inputs = (who, resource.get("apiVersion"), resource.get("kind"), resource.get("spec"))
        known = self._parsed.get(uid)
        if known is None or known[0] != inputs:
            known = (inputs, parse(resource))
            _keep(self._parsed, uid, known)
        return known[1]

    def derived(
        self,
        inference: InferenceSpec,
        facts: ClusterFacts,
        profile: ModelProfile | None,
        nodes: tuple[NodeFacts, ...],
        derive: Callable[[], tuple[BudgetPlan | None, NodeFacts, Desired]],
    ) -> Derived:
        """The same inputs give what they gave; any other what `derive` returns."""
        inputs = (inference, *msgspec.structs.astuple(facts), profile, nodes)
        known = self._derived.get(inference.uid)
        if known is None or known[0] != inputs:
            plan, basis, desired = derive()
            digests = {owned.key[::2]: content_hash(owned.body) for owned in desired.objects}
            found = Derived(plan=plan, nodes=basis, desired=desired, digests=digests)
            known = (inputs, found)
            _keep(self._derived, inference.uid, known)
        return known[1]

    def check_integrity(self) -> None:
        """Nobody has changed what was handed out."""
        for _, derived in self._derived.values():
            for owned in derived.desired.objects:
                assert content_hash(owned.body) == derived.digests[owned.key[::2]]


def _keep(memory: OrderedDict[str, V], uid: str, value: V) -> None:
    memory.pop(uid, None)
    memory[uid] = value
    if len(memory) > MAX_RESOURCES:
        memory.popitem(last=False)
