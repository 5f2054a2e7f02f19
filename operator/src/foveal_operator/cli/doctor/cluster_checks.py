"""Checks of a cluster: the API server, the resource's definition, the caller's rights, the
namespace, the operator, nodes and their devices, storage, the optional APIs.

Called by `foveal doctor`. Each check asks what it needs; `guarded` turns a right that is missing
into a finding, so that one refusal hides nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from foveal_operator.api import crd
from foveal_operator.cli.doctor.report import Finding, fail, ok, warn
from foveal_operator.kube.diff import Change, diff
from foveal_operator.kube.reader import OPERATOR_SELECTOR, ForbiddenError, Reader
from foveal_operator.kube.types import (
    MEMORY_LABELS,
    SHARED_SUFFIX,
    Obj,
    allocatable,
    condition,
    device_bytes,
    label_of,
    num_shares,
)
from foveal_runtime.plan.quantity import short_bytes

Check = Callable[[Reader], Iterator[Finding]]
OLDEST_MINOR, NEWEST_MINOR = 34, 37
MAX_SKEW_SECONDS = 5.0
_CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd.PLURAL}.{crd.GROUP}"
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_NEEDED = (("get", crd.GROUP, crd.PLURAL), ("list", crd.GROUP, crd.PLURAL))
_USEFUL = (
    ("patch", crd.GROUP, crd.PLURAL, "you cannot apply resources"),
    ("get", "", "pods", "kubectl get pods will not show you why one fails"),
    ("get", "", "pods/log", "kubectl logs will not show you why one fails"),
    ("list", "events.k8s.io", "events", "kubectl events will not tell what happened"),
)


def guarded(area: str, check: Check, reader: Reader) -> Iterator[Finding]:
    """The check's findings; what it may not read becomes a warning."""
    try:
        yield from check(reader)
    except ForbiddenError as error:
        yield warn(area, f"cannot be checked: {error}", "ask an administrator to run foveal doctor")


def version_findings(reader: Reader) -> Iterator[Finding]:
    area = "api server"
    body = reader.get("/version") or {}
    text = str(body.get("gitVersion", "of unknown version"))
    digits = re.match(r"\d+", str(body.get("minor", "")))
    if digits and int(digits[0]) < OLDEST_MINOR:
        yield fail(area, f"{text} at {reader.server} is older than 1.{OLDEST_MINOR}",
                   f"upgrade the cluster: Foveal is tested on 1.{OLDEST_MINOR} to "
                   f"1.{NEWEST_MINOR}")  # fmt: skip
    elif digits and int(digits[0]) > NEWEST_MINOR:
        yield warn(area, f"{text} at {reader.server} is newer than 1.{NEWEST_MINOR}",
                   "look for a newer Foveal; this one was not tested with it")  # fmt: skip
    else:
        yield ok(area, f"{text} at {reader.server}")


def clock_findings(reader: Reader) -> Iterator[Finding]:
    """Leases and ages rest on clocks; certificates too."""
    area, skew = "clock", reader.skew_seconds()
    if skew is None:
        yield warn(area, "the API server did not say its time", "compare it with this machine's")
    elif abs(skew) > MAX_SKEW_SECONDS:
        way = "ahead of" if skew > 0 else "behind"
        yield warn(area, f"this machine is {abs(skew):.0f} s {way} the API server",
                   "set the time here and on the control plane (NTP)")  # fmt: skip
    else:
        yield ok(area, "agrees with the API server's")


def definition_findings(reader: Reader) -> Iterator[Finding]:
    area = "definition"
    apply = (
        "upgrade the chart, which holds it (helm upgrade); where crds.enabled is false, kubectl "
        "apply -f crds/ of this release"
    )
    try:
        found = reader.get(_CRD)
    except ForbiddenError:
        # Its schema is an administrator's to read; whether it is served, everybody may ask.
        if reader.get(f"/apis/{crd.GROUP}/{crd.VERSION}") is None:
            yield fail(area, f"{crd.GROUP}/{crd.VERSION} is not served", apply)
        else:
            yield ok(area, f"{crd.GROUP}/{crd.VERSION} is served; its schema was not compared")
        return
    if found is None:
        yield fail(area, f"{crd.PLURAL}.{crd.GROUP} is not installed", apply)
        return
    served = [v["name"] for v in found.get("spec", {}).get("versions") or () if v.get("served")]
    if crd.VERSION not in served:
        yield fail(area, f"serves {', '.join(served) or 'nothing'}, not {crd.VERSION}", apply)
        return
    if condition(found, "Established").get("status") != "True":
        yield fail(area, "is installed and not established", f"kubectl describe crd {crd.PLURAL}."
                   f"{crd.GROUP} says which name is in the way")  # fmt: skip
        return
    changes = _schema_changes(found)
    if changes:
        yield warn(area, f"differs from this release's in {changes} fields", apply)
    else:
        yield ok(area, f"{crd.GROUP}/{crd.VERSION} as in this release")


def _schema_changes(found: Obj) -> int:
    """Fields that differ, either way round."""
    ours: Any = crd.custom_resource_definition()["spec"]["versions"][0]["schema"]
    theirs = next(v for v in found["spec"]["versions"] if v["name"] == crd.VERSION)["schema"]
    forth = diff({"kind": "", "metadata": {"name": ""}, **ours}, theirs)
    back = diff({"kind": "", "metadata": {"name": ""}, **theirs}, ours)
    paths = {change.path for change in (*forth, *back) if not _is_same_number(change)}
    return len({path for path in paths if not path.startswith(("kind", "metadata"))})


def _is_same_number(change: Change) -> bool:
    """The API server keeps bounds as floats and prints 2^60 with zeros at its end."""
    both = (change.before, change.after)
    return all(isinstance(one, int | float) for one in both) and float(both[0]) == float(both[1])


def _may(reader: Reader, verb: str, group: str, resource: str) -> bool:
    name, _, sub = resource.partition("/")
    attributes = {"namespace": reader.namespace, "verb": verb, "group": group, "resource": name}
    if sub:
        attributes["subresource"] = sub
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = reader.review(_REVIEWS, body)
    return bool(answer.get("status", {}).get("allowed"))


def rights_findings(reader: Reader) -> Iterator[Finding]:
    """The caller's own."""
    area = "your rights"
    lacking = [
        f"{verb} {res}" for verb, group, res in _NEEDED if not _may(reader, verb, group, res)
    ]
    if lacking:
        yield fail(area, f"in {reader.namespace} you may not {' or '.join(lacking)}",
                   f"ask for a role on {crd.PLURAL}.{crd.GROUP} in this namespace")  # fmt: skip
    few = [(verb, res, why) for verb, group, res, why in _USEFUL
           if not _may(reader, verb, group, res)]  # fmt: skip
    for verb, resource, why in few:
        yield warn(area, f"in {reader.namespace} you may not {verb} {resource}: {why}",
                   "ask for the right if you look after this namespace")  # fmt: skip
    if not lacking and not few:
        yield ok(area, f"enough in namespace {reader.namespace}")


def namespace_findings(reader: Reader) -> Iterator[Finding]:
    area = "namespace"
    found = reader.get(f"/api/v1/namespaces/{reader.namespace}")
    if found is None:
        yield fail(area, f"{reader.namespace} does not exist",
                   f"kubectl create namespace {reader.namespace}")  # fmt: skip
        return
    if found["metadata"].get("deletionTimestamp"):
        yield fail(area, f"{reader.namespace} is being deleted", "use another namespace")
        return
    level = label_of(found, "pod-security.kubernetes.io/enforce")
    said = f"enforces Pod Security {level}" if level else "enforces no Pod Security level"
    yield ok(area, f"{reader.namespace} {said}; Foveal's pods meet restricted")
    yield from _quotas(reader)


def _quotas(reader: Reader) -> Iterator[Finding]:
    area, base = "quota", f"/api/v1/namespaces/{reader.namespace}"
    for quota in (reader.get(f"{base}/resourcequotas") or {}).get("items") or ():
        hard = quota.get("status", {}).get("hard") or {}
        used = quota.get("status", {}).get("used") or {}
        held = [f"{name} {used.get(name, '0')} of {hard[name]}" for name in sorted(hard)
                if "memory" in name or "cpu" in name or "gpu" in name]  # fmt: skip
        if held:
            yield warn(area, f"{quota['metadata']['name']}: {', '.join(held)}",
                       "compare with foveal plan: pods beyond the quota are not made")  # fmt: skip
    for limits in (reader.get(f"{base}/limitranges") or {}).get("items") or ():
        for limit in limits.get("spec", {}).get("limits") or ():
            most = (limit.get("max") or {}).get("memory")
            if most:
                name = limits["metadata"]["name"]
                yield warn(area, f"{name}: at most {most} of memory for a {limit.get('type')}",
                           "keep hostMemory below it, or pods are refused")  # fmt: skip
            given = (limit.get("default") or {}).get("cpu")
            if given:
                name = limits["metadata"]["name"]
                yield warn(area, f"{name}: {given} is the CPU limit of containers without one",
                           "set limits.cpu in podTemplates where pods ask for more, or they are "
                           "refused")  # fmt: skip


def operator_findings(reader: Reader) -> Iterator[Finding]:
    """Whether somebody acts on the namespace's resources, and only one."""
    area, acting = "operator", []
    found = reader.get("/apis/apps/v1/deployments", labelSelector=OPERATOR_SELECTOR) or {}
    for item in found.get("items") or ():
        namespace = item["metadata"].get("namespace", "-")
        where = f"{namespace}/{item['metadata']['name']}"
        ready = item.get("status", {}).get("readyReplicas", 0)
        wanted = item.get("spec", {}).get("replicas", 1)
        watched = _watched(item)
        if wanted and (not watched or reader.namespace in watched):
            acting.append(where)
        if ready < 1:
            yield fail(area, f"{where} has no ready pod",
                       f"kubectl -n {namespace} describe pods -l {OPERATOR_SELECTOR}")  # fmt: skip
        elif ready < wanted:
            yield warn(area, f"{where}: {ready} of {wanted} pods ready", "one is enough to act; "
                       "see why the other is not ready")  # fmt: skip
        else:
            yield ok(area, f"{where}: {ready} of {wanted} pods ready")
    if not found.get("items"):
        install = "helm install foveal charts/foveal -n foveal-system --create-namespace"
        yield fail(area, "no operator found (by its chart's labels)", install)
    elif not acting:
        yield warn(area, f"none acts on namespace {reader.namespace}", "name the one of your "
                   "resources with -n, or add it to the chart's rbac.watchNamespaces")  # fmt: skip
    elif len(acting) > 1:
        yield warn(area, f"{' and '.join(acting)} act on namespace {reader.namespace}, and each "
                   "changes back what the other writes", "keep one, or give each namespaces of "
                   "its own (rbac.scope: namespaced, rbac.watchNamespaces)")  # fmt: skip


def _watched(deployment: Obj) -> list[str]:
    """Namespaces that an operator watches; none for all."""
    containers = deployment.get("spec", {}).get("template", {}).get("spec", {}).get("containers")
    given = [arg for one in containers or () for arg in (one.get("args") or ())]
    names = [arg.partition("=")[2] for arg in given if arg.startswith("--namespaces=")]
    return [name for name in (names[-1] if names else "").split(",") if name]


MIN_NODE_BYTES = 4 * 1024**3
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


def _is_ready(node: Obj) -> bool:
    is_cordoned = node.get("spec", {}).get("unschedulable")
    return not is_cordoned and condition(node, "Ready").get("status") == "True"


def node_findings(reader: Reader) -> Iterator[Finding]:
    area = "nodes"
    nodes = _items(reader, "/api/v1/nodes")
    usable = [node for node in nodes if _is_ready(node)]
    if not usable:
        yield fail(area, f"none of {len(nodes)} is ready and schedulable",
                   "kubectl describe nodes says why; kubectl uncordon those you want")  # fmt: skip
        return
    largest = max(allocatable(node, "memory") for node in usable)
    text = f"{len(usable)} of {len(nodes)} ready; the largest offers {short_bytes(largest)}"
    if largest < MIN_NODE_BYTES:
        yield warn(area, text, "the smallest example needs 4 GiB on one node")
    else:
        yield ok(area, f"{text} to a pod, its /dev/shm included")
    for node in usable:
        bad = [kind for kind in _PRESSURES if condition(node, kind).get("status") == "True"]
        if bad:
            yield warn(area, f"{node['metadata']['name']} is under {', '.join(bad)}",
                       "pods are evicted from it: free memory or disk there")  # fmt: skip


def device_findings(reader: Reader) -> Iterator[Finding]:
    """Extended resources with a label for their memory, or resource slices."""
    area = "devices"
    nodes = [node for node in _items(reader, "/api/v1/nodes") if _is_ready(node)]
    found = False
    names = [
        (f"{name}{end}", at) for name, at in MEMORY_LABELS.items() for end in ("", SHARED_SUFFIX)
    ]
    for resource, label in names:
        holders = [node for node in nodes if allocatable(node, resource) > 0]
        if not holders:
            continue
        found = True
        total = sum(allocatable(node, resource) for node in holders)
        plural = "" if len(holders) == 1 else "s"
        text = f"{total} {resource} on {len(holders)} node{plural}"
        known = [device_bytes(node, resource) for node in holders]
        if not all(known):
            yield warn(area, f"{text}; {known.count(0)} lack the label {label}",
                       "set engine.accelerator.memory, or install feature discovery")  # fmt: skip
        else:
            shares = sorted({num_shares(node, resource) for node in holders})
            if shares != [1]:
                text += f" ({' or '.join(map(str, shares))} share a device)"
            sizes = Counter(short_bytes(one) for one in known)
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
