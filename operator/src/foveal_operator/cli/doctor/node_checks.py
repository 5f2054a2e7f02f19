"""Nodes and their devices, storage, the optional APIs.

Called by `foveal doctor`, guarded like the other checks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from foveal_operator.cli.doctor.report import Finding, fail, ok, warn
from foveal_operator.kube.reader import Reader
from foveal_operator.kube.types import Obj
from foveal_runtime.plan.quantity import is_quantity, parse, short_bytes

MIN_NODE_BYTES = 4 * 1024**3
MEMORY_LABELS = {"nvidia.com/gpu": "nvidia.com/gpu.memory", "amd.com/gpu": "amd.com/gpu.vram"}
"""In MiB, as feature discovery labels nodes. Extended resource -> label."""
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure")
# (API, kind, what is missing without it)
_WORTH = (
    ("metrics.k8s.io/v1beta1", "pods", "autoscaling by CPU and kubectl top do not work",
     "install metrics-server"),
    ("monitoring.coreos.com/v1", "podmonitors", "nothing scrapes the pods by itself",
     "install the Prometheus operator, or scrape the pods' /metrics yourself"),
    ("monitoring.coreos.com/v1", "prometheusrules", "there are no alerts",
     "install the Prometheus operator"),
)  # fmt: skip
_OPTIONAL = (
    ("keda.sh/v1alpha1", "scaledobjects", "autoscaling by anything but CPU"),
    ("gateway.networking.k8s.io/v1", "httproutes", "networking.httpRoute"),
    ("inference.networking.k8s.io/v1", "inferencepools", "networking.inferencePool"),
    ("resource.k8s.io/v1", "resourceclaimtemplates", "accelerator.deviceClassName"),
)


def _items(reader: Reader, path: str) -> list[Obj]:
    found = reader.get(path)
    return list((found or {}).get("items") or ())


def _amount(node: Obj, name: str) -> int:
    text = str(node.get("status", {}).get("allocatable", {}).get(name, "0"))
    return int(parse(text)) if is_quantity(text) else 0


def _is_ready(node: Obj) -> bool:
    return not node.get("spec", {}).get("unschedulable") and any(
        c.get("type") == "Ready" and c.get("status") == "True"
        for c in node.get("status", {}).get("conditions") or ()
    )


def node_findings(reader: Reader) -> Iterator[Finding]:
    area = "nodes"
    nodes = _items(reader, "/api/v1/nodes")
    usable = [node for node in nodes if _is_ready(node)]
    if not usable:
        yield fail(area, f"none of {len(nodes)} is ready and schedulable",
                   "kubectl describe nodes says why; kubectl uncordon those you want")  # fmt: skip
        return
    largest = max(_amount(node, "memory") for node in usable)
    text = f"{len(usable)} of {len(nodes)} ready; the largest offers {short_bytes(largest)}"
    if largest < MIN_NODE_BYTES:
        yield warn(area, text, "the smallest example needs 4 GiB on one node")
    else:
        yield ok(area, f"{text} to a pod, its /dev/shm included")
    for node in usable:
        bad = [c["type"] for c in node.get("status", {}).get("conditions") or ()
               if c.get("type") in _PRESSURES and c.get("status") == "True"]  # fmt: skip
        if bad:
            yield warn(area, f"{node['metadata']['name']} is under {', '.join(bad)}",
                       "pods are evicted from it: free memory or disk there")  # fmt: skip


def device_findings(reader: Reader) -> Iterator[Finding]:
    """Extended resources with a label for their memory, or resource slices."""
    area = "devices"
    nodes = [node for node in _items(reader, "/api/v1/nodes") if _is_ready(node)]
    found = False
    for resource, label in MEMORY_LABELS.items():
        holders = [node for node in nodes if _amount(node, resource) > 0]
        if not holders:
            continue
        found = True
        total = sum(_amount(node, resource) for node in holders)
        plural = "" if len(holders) == 1 else "s"
        text = f"{total} {resource} on {len(holders)} node{plural}"
        labels = [node["metadata"].get("labels", {}).get(label, "") for node in holders]
        if not all(one.isdigit() for one in labels):
            yield warn(area, f"{text}; {labels.count('')} lack the label {label}",
                       "set engine.accelerator.memory, or install feature discovery")  # fmt: skip
        else:
            sizes = Counter(short_bytes(int(one) << 20) for one in labels)
            yield ok(area, f"{text}, each of {' or '.join(sorted(sizes))}")
            if len(sizes) > 1:
                yield warn(area, "devices differ in memory: budgets keep to the smallest",
                           "choose nodes by engine.podTemplate.spec.nodeSelector, and set "
                           "engine.accelerator.memory")  # fmt: skip
    slices = _items(reader, "/apis/resource.k8s.io/v1/resourceslices")
    if slices:
        found = True
        count = sum(len(one.get("spec", {}).get("devices") or ()) for one in slices)
        drivers = sorted({str(one.get("spec", {}).get("driver", "")) for one in slices})
        yield ok(area, f"{count} for dynamic allocation, by {', '.join(drivers)}")
    if not found:
        yield warn(area, "no GPU on any ready node",
                   "install the vendor's device plugin, or use accelerator.type CPU")  # fmt: skip


def storage_findings(reader: Reader) -> Iterator[Finding]:
    area = "storage"
    classes = _items(reader, "/apis/storage.k8s.io/v1/storageclasses")
    if not classes:
        yield warn(area, "no storage class", "models by hf:// or s3:// need a claim: install a "
                   "provisioner, or use pvc:// or oci://")  # fmt: skip
        return
    names = [one["metadata"]["name"] for one in classes]
    defaults = [
        one["metadata"]["name"]
        for one in classes
        if one["metadata"].get("annotations", {}).get(_DEFAULT_CLASS) == "true"
    ]
    if not defaults:
        yield warn(area, f"no default among {', '.join(names)}",
                   "name one in model.cache.storageClassName")  # fmt: skip
    else:
        yield ok(area, f"{', '.join(names)}; default {defaults[0]} (pods on several nodes need one "
                 "that mounts on many)")  # fmt: skip


def api_findings(reader: Reader) -> Iterator[Finding]:
    area = "apis"
    wanted = [(version, kind) for version, kind, *_ in (*_WORTH, *_OPTIONAL)]
    served: dict[str, set[str]] = {}
    for version in {version for version, _ in wanted}:
        listed = reader.get(f"/apis/{version}") or {}
        served[version] = {entry["name"] for entry in listed.get("resources") or ()}
    present = [kind for version, kind in wanted if kind in served[version]]
    if present:
        yield ok(area, f"served: {', '.join(present)}")
    for version, kind, without, step in _WORTH:
        if kind not in served[version]:
            group = version.partition("/")[0]
            yield warn(area, f"{kind}.{group} is missing: {without}", step)
    absent = [f"{field} ({kind})" for version, kind, field in _OPTIONAL
              if kind not in served[version]]  # fmt: skip
    if absent:
        yield ok(area, f"resources cannot use {', '.join(absent)}")
