"""Stand-ins for the custom resources of others that Foveal's objects may be: KEDA, Prometheus, …

Their schemas are open: with them the API server checks names, metadata and ownership of such
objects, not their spec, which the tests of manifests/ compare by hand.
"""

from __future__ import annotations

from typing import Any

FOREIGN = {
    # kind: (group, version, plural)
    "PodMonitor": ("monitoring.coreos.com", "v1", "podmonitors"),
    "PrometheusRule": ("monitoring.coreos.com", "v1", "prometheusrules"),
    "ScaledObject": ("keda.sh", "v1alpha1", "scaledobjects"),
    "HTTPRoute": ("gateway.networking.k8s.io", "v1", "httproutes"),
    "InferencePool": ("inference.networking.k8s.io", "v1", "inferencepools"),
}


def definition(kind: str) -> dict[str, Any]:
    group, version, plural = FOREIGN[kind]
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {"name": version, "served": True, "storage": True}
    served |= {"schema": {"openAPIV3Schema": schema}, "subresources": {"status": {}}}
    metadata: dict[str, Any] = {"name": f"{plural}.{group}"}
    if group.endswith("k8s.io"):  # protected groups want to know who agreed
        metadata["annotations"] = {"api-approved.kubernetes.io": "unapproved, a test's stand-in"}
    names = {"kind": kind, "listKind": f"{kind}List", "plural": plural, "singular": kind.lower()}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": metadata,
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [served]},
    }
