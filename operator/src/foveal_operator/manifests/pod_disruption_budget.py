"""PodDisruptionBudgets: a node drain may evict one pod of a role at a time.

With one replica there is no budget, because it would block the drain without end. A pod that is not
ready may always be evicted: one that crashes must not keep a node from being drained."""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context, Role


def pod_disruption_budget(context: Context, role: Role) -> Obj:
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": context.selector(role)},
    }
    return context.object("policy/v1", "PodDisruptionBudget", role, role, spec=spec)
