"""What operator_scale.py makes and counts: resources, pods, metrics, processes. Decides nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts
from foveal_operator.model.flow import PROFILE_KEY, model_keys
from tests.support.api_server.api import Api
from tests.support.api_server.sandbox import KIND, MANAGED
from tests.support.regenerate import profile_for
from tests.support.samples import LEGAL, put

MAKERS = 4
FAILING = {"spec.frontend.podTemplate": {"spec": {"volumes": [{"name": "a", "nfs": {"x": 1}}]}}}
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


def resource(namespace: str, name: str, changes: Obj | None = None) -> Obj:
    obj = put(LEGAL["cpu"], "metadata", {"name": name, "namespace": namespace})
    for path, value in (changes or {}).items():
        obj = put(obj, path, value)
    return obj


def profile(namespace: str, obj: Obj) -> Obj:
    """Its model's profile, as a profile Job would leave it: there before the resource is."""
    inference = parse(obj)
    (name,) = [n for kind, n in model_keys(inference, ClusterFacts()) if kind == "ConfigMap"]
    labels = {
        "app.kubernetes.io/managed-by": "foveal-operator",
        "app.kubernetes.io/instance": obj["metadata"]["name"],
        "app.kubernetes.io/component": "model",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "immutable": True,
        "data": {PROFILE_KEY: msgspec.json.encode(profile_for(inference)).decode()},
    }


def prepare(api: Api, namespace: str) -> None:
    """The claim with the model."""
    size = {"requests": {"storage": "1Gi"}}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": size},
    }
    api.create(claim).must()


def create(api: Api, namespace: str, names: Sequence[str], changes: Obj | None = None) -> None:
    """Profiles first, then the resources, a few at a time. Raises the first refusal."""
    bodies = [resource(namespace, name, changes) for name in names]
    profiles = [profile(namespace, body) for body in bodies]
    in_parallel([lambda b=b: api.create(b).must() for b in profiles])
    in_parallel([lambda b=b: api.create(b).must() for b in bodies])


def in_parallel(jobs: Iterable[Callable[[], Any]]) -> None:
    left, errors = list(jobs), []

    def work() -> None:
        while left and not errors:
            try:
                left.pop()()
            except IndexError:
                return
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(min(MAKERS, len(left)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def add_pod(api: Api, namespace: str, name: str) -> None:
    """An engine's pod, as the StatefulSet's controller would make it; it has just begun."""
    workload = api.get("StatefulSet", namespace, f"{name}-engine")
    assert workload is not None
    template = workload["spec"]["template"]
    metadata = {**template["metadata"], "name": f"{name}-engine-0", "namespace": namespace}
    spec = {**template["spec"], "nodeName": "nowhere"}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": spec.get("serviceAccountName", name), "namespace": namespace},
    }
    api.create(account)  # 409 once it is there
    api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}).must()


def set_ready(api: Api, namespace: str, name: str) -> None:
    ready = [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")]
    change = {"status": {"phase": "Running", "conditions": ready}}
    api.merge("Pod", namespace, f"{name}-engine-0", change, "status").must()


# --- counting ------------------------------------------------------------------------------------
def counter(api: Api, namespace: str, kind: str, *, has_status: bool = False) -> Callable[[], int]:
    """How many there are; with `has_status` only those whose status speaks of their spec."""
    path = api.path(kind, namespace)

    def count() -> int:
        if has_status:
            items = api.request("GET", path, resourceVersion="0").must()["items"] or ()
            return sum(
                item.get("status", {}).get("observedGeneration") == item["metadata"]["generation"]
                for item in items
            )
        reply = api.request("GET", path, accept=_METADATA, resourceVersion="0")
        return len(reply.must()["items"] or ())

    return count


def versions(api: Api, namespace: str, kinds: Sequence[str]) -> dict[str, str]:
    """resourceVersion of everything that is the operator's, and of the resources."""
    found = {}
    for kind in kinds:
        selector = {} if kind == KIND else {"labelSelector": MANAGED}
        path = api.path(kind, namespace)
        for item in api.request("GET", path, accept=_METADATA, **selector).must()["items"] or ():
            metadata = item["metadata"]
            found[f"{kind}/{metadata['name']}"] = metadata["resourceVersion"]
    return found


def metric(text: str, name: str, labels: dict[str, str]) -> float:
    """The sum over all series of a metric that have these labels."""
    total = 0.0
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ")) and all(
            f'{key}="{value}"' in line for key, value in labels.items()
        ):
            total += float(line.rpartition(" ")[2])
    return total


def percentile(values: Sequence[float], percent: int) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmHWM")
