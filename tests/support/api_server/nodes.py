"""Plays scheduler and kubelet: binds pods to nodes of ours and reports of them what a test says.

Used with the real controllers (fixture controlled_cluster), which make pods of Deployments,
StatefulSets and Jobs. Each pod has a fate: ready, unless a rule says otherwise. Works on a thread
that looks at the pods again and again; never runs a container.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import httpx

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, wait_until

TICK_SECONDS = 0.1
LONG_AGO = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Fate:
    """What becomes of a pod.

    Attributes:
        phase: of the pod. Pending without `waiting` means that no node takes it.
        ready: of its containers.
        waiting: reason why they wait, such as ImagePullBackOff.
        ended: reason why they ended (at last), such as OOMKilled.
        exit_code, message: of that end; message is the last line of the log.
    """

    phase: str = "Running"
    ready: bool = True
    waiting: str = ""
    ended: str = ""
    exit_code: int = 0
    message: str = ""
    restarts: int = 0


READY = Fate()
UNSCHEDULABLE = Fate(phase="Pending", ready=False)
IMAGE_PULL = Fate("Pending", False, "ImagePullBackOff", message="Back-off pulling image")
CRASH = Fate("Running", False, "CrashLoopBackOff", "Error", 1, "ValueError: bad", restarts=3)
OUT_OF_MEMORY = Fate("Running", False, "CrashLoopBackOff", "OOMKilled", 137, restarts=1)
SUCCEEDED = Fate("Succeeded", False, ended="Completed")
FAILED = Fate("Failed", False, ended="Error", exit_code=1, message="no")


def crash(message: str, exit_code: int = 1) -> Fate:
    return replace(CRASH, message=message, exit_code=exit_code)


Rule = tuple[Callable[[Obj], bool], Fate]


class Nodes:
    """A set of equal nodes. Use it in a with statement.

    `devices` are allocatable on each node; a pod that asks for more than is free stays Pending.
    Without `binds` it is kubelet alone: a scheduler that the test has started binds the pods.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        *,
        num: int = 1,
        devices: int = 8,
        binds: bool = True,
    ) -> None:
        self._api = Api(cluster)
        self._namespace = namespace
        self._names = [f"{namespace}-node-{i}" for i in range(num)]
        self._devices, self._binds = devices, binds
        self._rules: list[Rule] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nodes")
        self._num_addresses = 0
        self.defects: list[str] = []

    def __enter__(self) -> Nodes:
        for name in self._names:
            self._api.apply(self._node(name)).must()
            status = self._node(name)["status"]
            self._api.merge("Node", "", name, {"status": status}, "status").must()
            # The API server gives it one of a node that is not ready; nobody here takes it away.
            self._api.merge("Node", "", name, {"spec": {"taints": None}}).must()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(20)
        for name in self._names:
            self._api.delete("Node", "", name)
        self._api.close()
        if kind is None:
            assert not self.defects, self.defects

    # --- what tests say ------------------------------------------------------------------------
    def fate(self, fate: Fate, component: str = "") -> None:
        """From now on pods of a component, or all, end so; the last rule that fits counts."""

        def fits(pod: Obj) -> bool:
            labels = pod["metadata"].get("labels", {})
            return component in ("", labels.get("app.kubernetes.io/component"))

        self._rules.append((fits, fate))

    def pods(self, component: str = "") -> list[Obj]:
        selector = f"app.kubernetes.io/component={component}" if component else ""
        return self._api.list("Pod", self._namespace, selector)

    def wait_for(
        self, component: str, num: int, timeout_seconds: float = 180.0, *, ready: bool = True
    ) -> list[Obj]:
        """Exactly `num` pods of a component, all ready or all not."""

        what = f"{num} pods of {component} that are {'ready' if ready else 'not ready'}"
        wait_until(what, lambda: self.are_ready(component, num, ready=ready), timeout_seconds)
        return self.pods(component)

    def are_ready(self, component: str, num: int, *, ready: bool = True) -> bool:
        """There are `num` pods of a component, all ready or all not."""
        found = self.pods(component)
        return len(found) == num and all(is_ready(pod) is ready for pod in found)

    # --- the player ----------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                pods = self._api.list("Pod", self._namespace)
                for pod in pods:
                    self._play(pod, pods)
            except httpx.HTTPError as error:  # the API server is made to stumble by some tests
                self.defects += [str(error)] if len(self.defects) > 100 else []
            except Exception as error:
                self.defects.append(f"{type(error).__name__}: {error}")
                return

    def _play(self, pod: Obj, pods: list[Obj]) -> None:
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            uid = {"uid": metadata["uid"]}
            path = self._api.path("Pod", self._namespace, metadata["name"])
            options = {"gracePeriodSeconds": 0, "preconditions": uid}
            self._api.request(
                "DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", **options}
            )
            return
        fate = self._fate_of(pod)
        if not pod["spec"].get("nodeName"):
            if self._binds:
                self._schedule(pod, pods, fate)
            return
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed") or fate == UNSCHEDULABLE:
            return  # a pod that has its node keeps it
        self._report(pod, self._status(pod, fate))

    def _fate_of(self, pod: Obj) -> Fate:
        for fits, fate in reversed(self._rules):
            if fits(pod):
                return fate
        owners = [owner["kind"] for owner in pod["metadata"].get("ownerReferences", ())]
        return SUCCEEDED if owners == ["Job"] else READY

    def _schedule(self, pod: Obj, pods: list[Obj], fate: Fate) -> None:
        node = "" if fate == UNSCHEDULABLE else self._room_for(pod, pods)
        if not node:
            text = f"0/{len(self._names)} nodes are available: {len(self._names)} Insufficient gpu."
            why = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            self._report(pod, {"phase": "Pending", "conditions": [{**why, "message": text}]})
            return
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        metadata = {"name": name, "namespace": self._namespace}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": metadata, "target": target}
        path = self._api.path("Pod", self._namespace, name, "binding")
        if self._api.request("POST", path, binding).ok:
            pod["spec"]["nodeName"] = node

    def _room_for(self, pod: Obj, pods: list[Obj]) -> str:
        for node in self._names:
            there = [p for p in pods if p["spec"].get("nodeName") == node and not _is_over(p)]
            if devices_of(pod) + sum(map(devices_of, there)) <= self._devices:
                return node
        return ""

    def _status(self, pod: Obj, fate: Fate) -> Obj:
        self._num_addresses += "podIP" not in pod.get("status", {})
        high, low = divmod(self._num_addresses, 250)
        address = pod.get("status", {}).get("podIP") or f"127.8.{high}.{low + 1}"
        truth = {True: "True", False: "False"}
        conditions = {
            "PodScheduled": True,
            "Initialized": True,
            "ContainersReady": fate.ready,
            "Ready": fate.ready,
        }
        return {
            "phase": fate.phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [
                {"type": kind, "status": truth[is_true]} for kind, is_true in conditions.items()
            ],
            "containerStatuses": [
                _container_status(container, fate) for container in pod["spec"]["containers"]
            ],
        }

    def _report(self, pod: Obj, status: Obj) -> None:
        """Writes a status unless it stands there already."""
        if not _is_part_of(status, pod.get("status", {})):
            change = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": status}
            self._api.merge("Pod", self._namespace, pod["metadata"]["name"], change, "status")

    def _node(self, name: str) -> Obj:
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "500"}
        if self._devices:
            amounts["nvidia.com/gpu"] = str(self._devices)
        labels = {"nvidia.com/gpu.memory": "81920"} if self._devices else {}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "status": {"capacity": amounts, "allocatable": amounts, "conditions": [ready]},
        }


def is_ready(pod: Obj) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def devices_of(pod: Obj) -> int:
    limits = [c.get("resources", {}).get("limits", {}) for c in pod["spec"]["containers"]]
    return sum(int(one.get("nvidia.com/gpu", 0)) for one in limits)


def _is_over(pod: Obj) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def _container_status(container: Obj, fate: Fate) -> Obj:
    ended: Obj = {}
    if fate.ended:
        ended = {"reason": fate.ended, "exitCode": fate.exit_code, "message": fate.message}
        ended |= {"startedAt": LONG_AGO, "finishedAt": LONG_AGO}
    state: Obj = {"running": {"startedAt": LONG_AGO}}
    if fate.waiting:
        message = fate.message or "back-off 10s restarting failed container"
        state = {"waiting": {"reason": fate.waiting, "message": message}}
    elif ended:
        state = {"terminated": ended}
    return {
        "name": container["name"],
        "image": container["image"],
        "imageID": container["image"],
        "ready": fate.ready,
        "started": fate.ready,
        "restartCount": fate.restarts,
        "state": state,
        "lastState": {"terminated": ended} if fate.waiting and ended else {},
    }


def _is_part_of(part: Any, whole: Any) -> bool:
    if isinstance(part, Mapping):
        return isinstance(whole, Mapping) and all(
            _is_part_of(value, whole.get(key)) for key, value in part.items() if value != {}
        )
    if isinstance(part, list):
        return (
            isinstance(whole, list)
            and len(part) == len(whole)
            and all(map(_is_part_of, part, whole))
        )
    return bool(part == whole)
