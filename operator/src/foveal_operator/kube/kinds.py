"""The kinds of objects that the operator reads, writes and watches: their paths and treatment.

One table for the client, the watches, pruning and the chart's Role. Data only.
"""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from foveal_operator.api.crd import GROUP, KIND, PLURAL, VERSION

MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
FIELD_MANAGER = "foveal-operator"
OPERATOR_LABELS = {
    "app.kubernetes.io/part-of": "foveal",
    "app.kubernetes.io/component": "operator",
}
"""Of the operator's own Deployment and pods, by its chart."""
CHILD_SELECTOR = f"{MANAGED_BY}={FIELD_MANAGER}"
POD_LABEL = ("app.kubernetes.io/name", "foveal")
"""Workloads select their pods by it. The label `managed-by` is nobody's to restore on a pod."""
POD_SELECTOR = "=".join(POD_LABEL)


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of object.

    Attributes:
        watched: its objects are kept in a cache.
        pruned: owned objects that are wanted no more are deleted. False for what every resource
            has under one name for as long as it lives: the garbage collector takes it.
        optional: an API that a cluster may lack.
    """

    api_version: str
    name: str
    plural: str
    namespaced: bool = True
    watched: bool = True
    pruned: bool = True
    optional: bool = False

    @property
    def group(self) -> str:
        """ "" for core."""
        return self.api_version.rpartition("/")[0]

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    @property
    def root(self) -> str:
        return f"/apis/{self.api_version}" if self.group else f"/api/{self.api_version}"

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path, quoted; `namespace` None means all namespaces."""
        parts = [self.root]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts += [part for part in (self.plural, quote(name, safe=""), subresource) if part]
        return "/".join(parts)


INFERENCE = Kind(api_version=f"{GROUP}/{VERSION}", name=KIND, plural=PLURAL, pruned=False)
POD = Kind(api_version="v1", name="Pod", plural="pods", pruned=False)
CONFIG_MAP = Kind(api_version="v1", name="ConfigMap", plural="configmaps")
STATEFUL_SET = Kind(api_version="apps/v1", name="StatefulSet", plural="statefulsets", pruned=False)
DEPLOYMENT = Kind(api_version="apps/v1", name="Deployment", plural="deployments", pruned=False)
SERVICE = Kind(api_version="v1", name="Service", plural="services", pruned=False)
# Written by the cluster with the labels of our Service: which pods it can reach.
ENDPOINT_SLICE = Kind(
    api_version="discovery.k8s.io/v1", name="EndpointSlice", plural="endpointslices", pruned=False
)
JOB = Kind(api_version="batch/v1", name="Job", plural="jobs")
# Its content is never the operator's to read: no watch, no cache, only `create`.
SECRET = Kind(api_version="v1", name="Secret", plural="secrets", watched=False, pruned=False)
CLAIM = Kind(
    api_version="v1", name="PersistentVolumeClaim", plural="persistentvolumeclaims", pruned=False
)
LEASE = Kind(
    api_version="coordination.k8s.io/v1", name="Lease", plural="leases", watched=False,
    pruned=False,
)  # fmt: skip
EVENT = Kind(
    api_version="events.k8s.io/v1", name="Event", plural="events", watched=False, pruned=False
)
NODE = Kind(
    api_version="v1", name="Node", plural="nodes", namespaced=False, watched=False, pruned=False
)
CLAIM_TEMPLATE = Kind(
    api_version="resource.k8s.io/v1",
    name="ResourceClaimTemplate",
    plural="resourceclaimtemplates",
    optional=True,
)
RESOURCE_SLICE = Kind(
    api_version="resource.k8s.io/v1", name="ResourceSlice", plural="resourceslices",
    namespaced=False, watched=False, pruned=False, optional=True,
)  # fmt: skip
DEVICE_CLASS = Kind(
    api_version="resource.k8s.io/v1", name="DeviceClass", plural="deviceclasses",
    namespaced=False, watched=False, pruned=False, optional=True,
)  # fmt: skip

KINDS: tuple[Kind, ...] = (
    INFERENCE,
    POD,
    CONFIG_MAP,
    SERVICE,
    ENDPOINT_SLICE,
    Kind(api_version="v1", name="ServiceAccount", plural="serviceaccounts", pruned=False),
    CLAIM,
    SECRET,
    STATEFUL_SET,
    DEPLOYMENT,
    JOB,
    Kind(api_version="policy/v1", name="PodDisruptionBudget", plural="poddisruptionbudgets"),
    Kind(api_version="networking.k8s.io/v1", name="NetworkPolicy", plural="networkpolicies"),
    Kind(
        api_version="autoscaling/v2",
        name="HorizontalPodAutoscaler",
        plural="horizontalpodautoscalers",
    ),
    Kind(
        api_version="monitoring.coreos.com/v1",
        name="PodMonitor",
        plural="podmonitors",
        optional=True,
    ),
    Kind(
        api_version="monitoring.coreos.com/v1",
        name="PrometheusRule",
        plural="prometheusrules",
        optional=True,
    ),
    Kind(
        api_version="keda.sh/v1alpha1", name="ScaledObject", plural="scaledobjects", optional=True
    ),
    Kind(
        api_version="gateway.networking.k8s.io/v1",
        name="HTTPRoute",
        plural="httproutes",
        optional=True,
    ),
    Kind(
        api_version="inference.networking.k8s.io/v1",
        name="InferencePool",
        plural="inferencepools",
        optional=True,
    ),
    CLAIM_TEMPLATE,
    LEASE,
    EVENT,
    NODE,
    RESOURCE_SLICE,
    DEVICE_CLASS,
)
BY_NAME = {kind.name: kind for kind in KINDS}
OPTIONAL = tuple(kind for kind in KINDS if kind.optional and kind.watched)
WATCHED = tuple(kind for kind in KINDS if kind.watched)


def kind_of(body: dict[str, object]) -> Kind:
    """The kind of an object; its apiVersion must be the table's. Raises KeyError."""
    kind = BY_NAME[str(body["kind"])]
    if body.get("apiVersion", kind.api_version) != kind.api_version:
        raise KeyError(f"{body['apiVersion']} {body['kind']}")
    return kind
