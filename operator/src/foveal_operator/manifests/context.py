"""Input of every builder: the resource, the plan, facts about the cluster; names and labels.

Made once per reconcile by manifests.desired. Builders read it and never anything else: the same
context gives the same objects, byte for byte.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from foveal_operator.api.crd import GROUP, KIND, VERSION
from foveal_operator.api.parse import InferenceSpec
from foveal_operator.kube.types import Obj
from foveal_runtime.plan.budget.types import BudgetPlan

Role = Literal["frontend", "engine", "model"]
Policy = Literal["Apply", "CreateOnly", "Retain", "Keep"]
"""Apply: server-side apply, owned. CreateOnly: made once, never read back or changed. Retain:
applied without owner reference, so it outlives the resource. Keep: lies there, made by another
release, and is left as it is."""

ENGINE_PORT = 5570
ENGINE_HTTP_PORT = 5580
ENGINE_EVENTS_PORT = 5557
"""vLLM's default; the replay socket is one up."""
PROGRESS_PORT = 8000
"""Of a fetch Job's pod."""


class ClusterFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the reconciler has seen of the cluster and decided before; all of it input.

    Attributes:
        runtime_image: image of all pods unless the resource names one. The reconciler keeps the
            image that a resource started with, so that a new operator restarts nothing.
        apis: kinds of optional APIs that the cluster serves, such as "PodMonitor".
        model_ready: the model lies where pods look for it; without it no pod is asked for.
        live_frontends, live_engines: replicas there are, applied until the autoscaler owns them.
        frontends_handed_over, engines_handed_over: the autoscaler owns spec.replicas.
        monitoring_namespace: all of its pods may read engines' metrics; "" = nobody.
        operator_namespace: where the operator runs, which probes engines; "" = in no pod.
        frontend_ports: where frontends that are there or on their way listen, in order.
        key_generation: which set of CURVE keys pods share; "" is the first.
        unhashed_devices: spec of the claim template without a hash in its name that engines have
            had since an earlier release; {} where they have none.
        rule_groups, dashboards: generated elsewhere from the metric registry.
    """

    runtime_image: str = "foveal/runtime:0.1.0"
    apis: frozenset[str] = frozenset()
    model_ready: bool = True
    live_frontends: int | None = None
    live_engines: int | None = None
    frontends_handed_over: bool = False
    engines_handed_over: bool = False
    monitoring_namespace: str = "monitoring"
    operator_namespace: str = ""
    cluster_domain: str = "cluster.local"
    frontend_ports: tuple[int, ...] = ()
    key_generation: str = ""
    unhashed_devices: Obj = {}
    rule_groups: tuple[Obj, ...] = ()
    dashboards: dict[str, str] = {}


class Owned(msgspec.Struct, frozen=True, kw_only=True):
    """One object and how the operator treats it."""

    body: Obj
    policy: Policy = "Apply"

    @property
    def key(self) -> tuple[str, str, str]:
        """(kind, namespace, name)."""
        metadata = self.body["metadata"]
        return self.body["kind"], metadata["namespace"], metadata["name"]


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """One reconcile's input. `plan` is None until a profile is known."""

    inference: InferenceSpec
    plan: BudgetPlan | None
    facts: ClusterFacts

    @property
    def name(self) -> str:
        return self.inference.name

    @property
    def image(self) -> str:
        return self.inference.spec.image or self.facts.runtime_image

    @property
    def budgets(self) -> BudgetPlan:
        assert self.plan is not None, "pods are only built from a plan"
        return self.plan

    def child(self, suffix: str) -> str:
        return f"{self.name}-{suffix}"

    def selector(self, role: Role) -> dict[str, str]:
        """Labels that never change: what Services and workloads select by."""
        return {
            "app.kubernetes.io/name": "foveal",
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": role,
        }

    def labels(self, role: Role) -> dict[str, str]:
        return {**self.selector(role), "app.kubernetes.io/managed-by": "foveal-operator"}

    def metadata(self, suffix: str, role: Role, *, owned: bool = True) -> Obj:
        """Name, namespace, labels and (in a cluster) the owner."""
        name = self.child(suffix) if suffix else self.name
        metadata: Obj = {
            "name": name,
            "namespace": self.inference.namespace,
            "labels": self.labels(role),
        }
        if owned and self.inference.uid:
            metadata["ownerReferences"] = [
                {
                    "apiVersion": f"{GROUP}/{VERSION}",
                    "kind": KIND,
                    "name": self.name,
                    "uid": self.inference.uid,
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ]
        return metadata

    def object(self, api_version: str, kind: str, suffix: str, role: Role, **rest: Any) -> Obj:
        """An owned object."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": self.metadata(suffix, role),
            **rest,
        }


def content_hash(value: object) -> str:
    """Ten hex digits over canonical JSON: equal content, equal name, on every machine."""
    data = msgspec.json.encode(value, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:10]
