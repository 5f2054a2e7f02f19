"""One namespace with nodes, a proxy and an operator: what the reliability tests act in.

A test makes resources, breaks something, waits for `settled` and compares `children` with those of
an undisturbed run. Everything is taken down in the end, and the audit must have found nothing.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import ClusterFacts
from foveal_operator.model.flow import PROFILE_KEY, model_keys
from foveal_operator.model.job_state import RECORDED
from tests.support.api_server.api import Api
from tests.support.api_server.audit import Audit
from tests.support.api_server.fault_proxy import FaultProxy
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.nodes import Nodes
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import Cluster, wait_until
from tests.support.api_server.stable import stable
from tests.support.regenerate import profile_for
from tests.support.samples import LEGAL, put

KIND = "MultiModalInference"
MANAGED = "app.kubernetes.io/managed-by=foveal-operator"
CHILD_KINDS = (
    *("ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim"),
    *("Deployment", "StatefulSet", "Job", "NetworkPolicy", "PodDisruptionBudget"),
    *("HorizontalPodAutoscaler", "PodMonitor", "PrometheusRule", "ScaledObject"),
    *("HTTPRoute", "InferencePool", "ResourceClaimTemplate"),
)
SETTLE_SECONDS = 180.0


def claim_in(namespace: str) -> Obj:
    """Where the sample's model lies."""
    size = {"requests": {"storage": "1Gi"}}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
        "spec": {"accessModes": ["ReadWriteMany"], "resources": size},
    }


def profile_of(stored: Obj) -> Obj:
    """The ConfigMap that a profile Job would have left for a stored resource."""
    meta = stored["metadata"]
    owner = {"apiVersion": stored["apiVersion"], "kind": KIND, "controller": True}
    owner |= {"name": meta["name"], "uid": meta["uid"]}
    labels = {
        "app.kubernetes.io/managed-by": "foveal-operator",
        "app.kubernetes.io/instance": meta["name"],
        "app.kubernetes.io/component": "model",
    }
    inference = parse(stored)
    text = msgspec.json.encode(profile_for(inference)).decode()
    keys = model_keys(inference, ClusterFacts())
    (name,) = [n for kind, n in keys if kind == "ConfigMap" and "-profile-" in n]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": labels,
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {PROFILE_KEY: text},
    }


class Sandbox:
    """`url_of` makes an operator's address: the proxy's."""

    def __init__(self, cluster: Cluster, api: Api, namespace: str, nodes: Nodes) -> None:
        self.cluster, self.api, self.namespace, self.nodes = cluster, api, namespace, nodes
        self.proxy = FaultProxy(cluster, Audit())
        self.operators: list[OperatorProcess] = []
        self.fork_server: ForkServer | None = None

    def operator(self, name: str = "a", *flags: str) -> OperatorProcess:
        """A replica, not started."""
        config = self.cluster.kubeconfig(
            f"{self.namespace}-{name}-{len(self.operators)}", url=self.proxy.url(name)
        )
        operator = OperatorProcess(name, config, self.namespace, *flags)
        operator.fork_server = self.fork_server
        self.operators.append(operator)
        return operator

    # --- the user --------------------------------------------------------------------------------
    def sample(self, name: str = "cpu", **changes: Any) -> Obj:
        """A sample in this namespace; changes are dotted paths with __ for the dot."""
        obj = put(LEGAL[name], "metadata.namespace", self.namespace)
        for path, value in changes.items():
            obj = put(obj, "spec." + path.replace("__", "."), value)
        return obj

    def apply(self, obj: Obj) -> Obj:
        """As the user; the model's profile is there already, as after the first start."""
        stored = self.api.apply(obj, "user").must()
        for body in (claim_in(self.namespace), profile_of(stored)):
            self.api.create(body)  # 409 once it is there
        return stored

    def resource(self, name: str = "qwen") -> Obj | None:
        return self.api.get(KIND, self.namespace, name)

    # --- what is there ---------------------------------------------------------------------------
    def children(self) -> dict[str, Obj]:
        """Everything the operator made, by kind/name, without what differs from run to run."""
        found = {}
        for kind in CHILD_KINDS:
            for obj in self.api.list(kind, self.namespace, MANAGED):
                obj["kind"] = kind
                found[f"{kind}/{obj['metadata']['name']}"] = self.normal(obj)
        return stable(found, self.namespace)

    def normal(self, obj: Obj) -> Obj:
        """Without what differs from run to run; `kind` must be in it."""
        kept = {"name", "labels", "annotations", "ownerReferences"}
        plain = {k: v for k, v in copy.deepcopy(obj).items() if k not in ("status", "metadata")}
        plain["metadata"] = {k: v for k, v in obj["metadata"].items() if k in kept}
        plain["metadata"].get("annotations", {}).pop("deployment.kubernetes.io/revision", None)
        if obj["kind"] == "Secret":
            plain["data"] = sorted(obj.get("data", {}))
        if obj["metadata"]["name"].endswith("-rollout"):  # since when, as a time of day
            plain["data"] = sorted(obj.get("data", {}))
        if obj["kind"] == "Service":
            plain["spec"].pop("clusterIP", None)
            plain["spec"].pop("clusterIPs", None)
        for owner in plain["metadata"].get("ownerReferences", ()):
            owner["uid"] = "UID"
        return plain

    def versions(self) -> dict[str, str]:
        """resourceVersion of every child; of workloads, whose controllers write a status when it
        suits them, the generation and the labels."""
        found = {}
        for kind in CHILD_KINDS:
            for obj in self.api.list(kind, self.namespace, MANAGED):
                metadata = obj["metadata"]
                version = str(metadata["resourceVersion"])
                if "generation" in metadata and "status" in obj:
                    version = f"{metadata['generation']} {sorted(metadata['labels'].items())}"
                found[f"{kind}/{metadata['name']}"] = f"{metadata['uid']} {version}"
        return found

    def conditions(self, name: str = "qwen", field: str = "status") -> dict[str, str]:
        """Status (or reason) by type of condition; {} while it speaks of an older spec."""
        obj = self.resource(name) or {}
        status = obj.get("status", {})
        if status.get("observedGeneration") != obj.get("metadata", {}).get("generation"):
            return {}
        return {c["type"]: c[field] for c in status.get("conditions", ())}

    def condition_text(self, kind: str) -> str:
        """Reason and message of a condition, also of an older spec; "" where there is none."""
        found = (self.resource() or {}).get("status", {}).get("conditions", ())
        return next((f"{c['reason']}: {c['message']}" for c in found if c["type"] == kind), "")

    def wait_condition(
        self, kind: str, value: str = "True", timeout_seconds: float = SETTLE_SECONDS
    ) -> None:
        try:
            wait_until(
                f"{kind}={value}", lambda: self.conditions().get(kind) == value, timeout_seconds
            )
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.told()}") from None

    def told(self) -> str:
        """What helps to understand a failure: status, last writes, the operators' last lines."""
        status = json.dumps((self.resource() or {}).get("status", {}), indent=1)
        writes = "\n".join(f"{call} -> {code}" for call, code in self.proxy.writes[-15:])
        logs = "\n".join(f"--- {o.name}\n{o.log_tail()}" for o in self.operators)
        return f"{status[-4000:]}\n{writes}\n{logs}"

    def wait_children(
        self, expected: dict[str, Obj], timeout_seconds: float = SETTLE_SECONDS
    ) -> None:
        """Until the children are those of an undisturbed run."""
        try:
            wait_until(
                "the children of an undisturbed run",
                lambda: not difference(self.children(), expected),
                timeout_seconds,
            )
        except TimeoutError as error:
            what = difference(self.children(), expected)
            raise TimeoutError(f"{error}\n{what}\n{self.told()}") from None

    def settled(self, quiet_seconds: float = 1.0, timeout_seconds: float = SETTLE_SECONDS) -> None:
        """Until the operator has written nothing for a while."""
        seen = [self.proxy.num_writes, time.monotonic()]

        def quiet() -> bool:
            writes = sum(not call.is_lease for call, _ in self.proxy.writes)
            if writes != seen[0]:
                seen[:] = [writes, time.monotonic()]
            return time.monotonic() - seen[1] >= quiet_seconds

        wait_until("the operator rests", quiet, timeout_seconds)


def difference(found: dict[str, Obj], expected: dict[str, Obj]) -> str:
    """In words, by object and field. Without Jobs that expire: whether one was made before its
    profile was there to be read is chance, and the cluster removes those that were."""
    found, expected = _lasting(found), _lasting(expected)
    lines = [f"missing: {key}" for key in expected.keys() - found.keys()]
    lines += [f"too many: {key}" for key in found.keys() - expected.keys()]
    for key in found.keys() & expected.keys():
        lines += [f"{key} {line}" for line in _fields(found[key], expected[key], "")]
    return "\n".join(sorted(lines))


def _lasting(children: dict[str, Obj]) -> dict[str, Obj]:
    return {
        key: body
        for key, body in children.items()
        if RECORDED not in (body["metadata"].get("annotations") or {})
    }


def _fields(found: Any, expected: Any, path: str) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            yield from _fields(found.get(key), expected.get(key), f"{path}.{key}")
    elif found != expected:
        yield f"{path}: {found!r:.200} instead of {expected!r:.200}"


@contextlib.contextmanager
def running_sandbox(
    cluster: Cluster, namespace: str, *, devices: int = 8, binds: bool = True
) -> Iterator[Sandbox]:
    """Nodes and proxy run; operators are the test's to start. Fails on broken audit rules."""
    nodes = Nodes(cluster, namespace, devices=devices, binds=binds)
    with Api(cluster) as api, nodes:
        sandbox = Sandbox(cluster, api, namespace, nodes)
        with sandbox.proxy:
            try:
                yield sandbox
            finally:
                for operator in sandbox.operators:
                    if operator.is_alive:
                        operator.stop()
        assert not sandbox.proxy.audit.violations, "\n".join(sandbox.proxy.audit.violations)
