"""The operator over a FakeCluster in which everything else goes well at once: Jobs end, claims are
bound, pods come up and go. Deterministic; for tests that ask what stands there in the end.

`InstantCluster.become(spec)` is one user's edit, followed to rest; `objects()` is what is left,
without what differs from run to run or is kept on purpose.
"""

from __future__ import annotations

import copy
import json

import msgspec

from foveal_operator.kube.kinds import (
    BY_NAME,
    CLAIM,
    FIELD_MANAGER,
    INFERENCE,
    JOB,
    MANAGED_BY,
    POD,
    STATEFUL_SET,
)
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.rollout.steps import is_held
from foveal_operator.testing.fake_cluster import FakeCluster
from tests.support.budget_samples import TOY, VLM
from tests.support.fake_clock import START
from tests.support.operator_rig import Kit

NAMESPACE, NAME = "models", "qwen"
BAD_IMAGE = "registry.example/foveal-runtime:bad"
ROUNDS = 60
ROUND_SECONDS = 11.0
_COMPONENT = "app.kubernetes.io/component"


class InstantCluster:
    """One namespace with one resource. Everything optional is served."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.kit = Kit(self.cluster)
        self.cluster.now_text = self.kit.time.clock.now_text
        self._has_started = False
        self._num_frontends = 0
        self.cluster.add(_node())
        self.cluster.add(_devices())
        for name in ("models", "shared-tmpfs", "warm", "w", "c"):
            self.cluster.add(_claim(name))

    # --- the user ----------------------------------------------------------------------------
    async def become(self, spec: Obj) -> None:
        """The resource has this spec, and everybody has done his part."""
        if not self._has_started:
            await self.kit.start()
            self._has_started = True
        if (INFERENCE.name, NAMESPACE, NAME) not in self.cluster.objects:
            metadata = {"name": NAME, "namespace": NAMESPACE}
            body = {"apiVersion": INFERENCE.api_version, "kind": INFERENCE.name}
            self.cluster.add({**body, "metadata": metadata, "spec": copy.deepcopy(spec)})
        else:
            self.cluster.edit(
                INFERENCE, NAMESPACE, NAME, lambda body: body.update(spec=copy.deepcopy(spec))
            )
        await self.rest()

    async def rest(self) -> None:
        """Until nothing changes any more, however long one waits."""
        num_quiet = 0
        for _ in range(ROUNDS):
            num_writes = len(self.cluster.writes)
            await self.kit.settle()
            has_played = self._play()
            self.kit.time.now += ROUND_SECONDS
            is_quiet = not has_played and len(self.cluster.writes) == num_writes
            num_quiet = num_quiet + 1 if is_quiet else 0
            if num_quiet == 3:
                self.cluster.check_integrity()
                self.kit.operator.caches.check_integrity()
                return
        raise AssertionError(f"no rest: {self.cluster.writes[-20:]}")

    # --- what is there -----------------------------------------------------------------------
    def objects(self) -> dict[str, Obj]:
        """What was made for the resource, by kind/name. Left out: documents and profiles of
        earlier specs, which are kept for a way back; times; the user's own objects."""
        found: dict[str, Obj] = {}
        for (kind, _, name), body in self.cluster.objects.items():
            if kind in ("Pod", INFERENCE.name) or not _is_ours(body):
                continue
            found[f"{kind}/{name}"] = _normal(body)
        workloads = ("Deployment", "StatefulSet")
        used = json.dumps([found[key]["spec"] for key in found if key.startswith(workloads)])
        good = json.dumps([one for key, one in found.items() if key.endswith("-rollout")])
        return {key: body for key, body in found.items() if not _is_kept(key, body, used, good)}

    def told(self) -> Obj:
        """The status, without times and versions and what speaks of the way here."""
        status = copy.deepcopy(self.cluster.body(INFERENCE.name, NAME, NAMESPACE).get("status", {}))
        for part in ("observedGeneration", "rolloutStrategy", "lastFailure"):
            status.pop(part, None)
        said = ("status", "reason", "message")
        status["conditions"] = {
            condition["type"]: {key: condition.get(key, "") for key in said}
            for condition in status.get("conditions", ())
        }
        return dict(status)

    def condition(self, kind: str) -> tuple[str, str]:
        """(status, reason)"""
        found = self.told()["conditions"].get(kind, {"status": "", "reason": ""})
        return found["status"], found["reason"]

    def pods(self, component: str) -> list[Obj]:
        return [
            body
            for (kind, _, _), body in sorted(self.cluster.objects.items())
            if kind == "Pod" and body["metadata"]["labels"].get(_COMPONENT) == component
        ]

    # --- everybody else ----------------------------------------------------------------------
    def _play(self) -> bool:
        """One step of all controllers and nodes. True when anything moved."""
        before = len(self.cluster.writes), self._versions()
        for kind, step in (
            ("PersistentVolumeClaim", self._bind),
            ("Job", self._run_job),
            ("StatefulSet", self._run_stateful_set),
            ("Deployment", self._run_deployment),
        ):
            for (found, _, name), body in list(self.cluster.objects.items()):
                if found == kind:
                    step(name, body)
        self._drop_orphans()
        self._answer()
        return before != (len(self.cluster.writes), self._versions())

    def _versions(self) -> int:
        return max(int(o["metadata"]["resourceVersion"]) for o in self.cluster.objects.values())

    def _bind(self, name: str, claim: Obj) -> None:
        if claim.get("status", {}).get("phase") != "Bound":
            self.cluster.edit(
                CLAIM, NAMESPACE, name, lambda b: b.update(status={"phase": "Bound"}), "binder"
            )

    def _run_job(self, name: str, job: Obj) -> None:
        """Ends well, with a profile as last words; no time to live is long here."""
        if job.get("status", {}).get("succeeded"):
            if "ttlSecondsAfterFinished" in job["spec"]:
                self.cluster.remove(JOB, NAMESPACE, name)
            return
        template = job["spec"]["template"]
        labels = {**template["metadata"]["labels"], "job-name": name}
        profile = TOY if "CPU" in json.dumps(self._spec().get("engine", {})) else VLM
        ended = {
            "exitCode": 0,
            "message": msgspec.json.encode(profile).decode(),
            "finishedAt": START.isoformat(),
        }
        container = template["spec"]["containers"][0]["name"]
        states = [{"name": container, "state": {"terminated": ended}}]
        pod = f"{name}-x"
        if ("Pod", NAMESPACE, pod) in self.cluster.objects:
            self.cluster.remove(POD, NAMESPACE, pod)
        self._add_pod(pod, {**template, "metadata": {"labels": labels}}, job, states)
        conditions = [{"type": "Complete", "status": "True"}]
        status = {"succeeded": 1, "conditions": conditions}
        self.cluster.edit(JOB, NAMESPACE, name, lambda b: b.update(status=status), "controller")

    def _spec(self) -> Obj:
        return dict(self.cluster.body(INFERENCE.name, NAME, NAMESPACE)["spec"])

    def _run_stateful_set(self, name: str, body: Obj) -> None:
        generation = body["metadata"]["generation"]
        if body.get("status", {}).get("observedGeneration") != generation:
            status = {"observedGeneration": generation}
            self.cluster.edit(
                STATEFUL_SET, NAMESPACE, name, lambda b: b.update(status=status), "controller"
            )
        wanted = {f"{name}-{n}" for n in range(body["spec"]["replicas"])}
        there = {pod["metadata"]["name"] for pod in self.pods("engine")}
        for pod in sorted(there - wanted):
            self.cluster.remove(POD, NAMESPACE, pod)
        for pod in sorted(wanted - there):
            self._add_pod(pod, body["spec"]["template"], body)

    def _run_deployment(self, name: str, body: Obj) -> None:
        """All at once; of a held Deployment as many old and new ones as it says."""
        spec, template = body["spec"], body["spec"]["template"]
        revision = template["metadata"]["labels"][REVISION_LABEL]
        pods = self.pods("frontend")
        new = [p for p in pods if p["metadata"]["labels"][REVISION_LABEL] == revision]
        old = [p for p in pods if p not in new]
        num_new, num_old = spec["replicas"], 0
        if is_held(body):
            rolling = spec["strategy"]["rollingUpdate"]
            num_old = spec["replicas"] - rolling["maxUnavailable"]
            num_new = rolling["maxSurge"] + rolling["maxUnavailable"]
        for pod in (*new[num_new:], *old[num_old:]):
            self.cluster.remove(POD, NAMESPACE, pod["metadata"]["name"])
        for _ in range(num_new - len(new)):
            self._num_frontends += 1
            self._add_pod(f"{name}-{self._num_frontends}", template, body)

    def _add_pod(
        self, name: str, template: Obj, owner: Obj, states: list[Obj] | None = None
    ) -> None:
        is_bad = BAD_IMAGE in json.dumps(template["spec"]["containers"])
        ref = {key: owner[key] for key in ("apiVersion", "kind")} | {"controller": True}
        ref |= {key: owner["metadata"][key] for key in ("name", "uid")}
        if owner["kind"] == "Deployment":
            ref |= {"kind": "ReplicaSet", "name": f"{ref['name']}-5d9c"}
        container = template["spec"]["containers"][0]["name"]
        if states is None and is_bad:
            states = [{"name": container, "state": {"waiting": {"reason": "ImagePullBackOff"}}}]
        ready = "False" if states else "True"
        phase = "Pending" if is_bad else "Succeeded" if states else "Running"
        self.cluster.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    **copy.deepcopy(template["metadata"]),
                    **{"name": name, "namespace": NAMESPACE, "ownerReferences": [ref]},
                },
                "spec": copy.deepcopy(template["spec"]),
                "status": {
                    "phase": phase,
                    "conditions": [{"type": "Ready", "status": ready}],
                    "containerStatuses": states or [],
                },
            },
            manager="kubelet",
        )

    def _drop_orphans(self) -> None:
        """The garbage collector, for pods whose workload is gone."""
        uids = {body["metadata"]["uid"] for body in self.cluster.objects.values()}
        for (kind, _, name), body in list(self.cluster.objects.items()):
            refs = body["metadata"].get("ownerReferences", ())
            if kind == "Pod" and any(ref["uid"] not in uids for ref in refs):
                self.cluster.remove(POD, NAMESPACE, name)

    def _answer(self) -> None:
        """Gateways and autoscalers accept what they are given."""
        accepted = {"type": "Accepted", "status": "True"}
        for (kind, _, name), body in list(self.cluster.objects.items()):
            if kind == "HTTPRoute":
                said = {**accepted, "observedGeneration": body["metadata"]["generation"]}
                refs = [{"parentRef": ref} for ref in body["spec"]["parentRefs"]]
                status = {"parents": [{**ref, "conditions": [said]} for ref in refs]}
                if status == body.get("status"):
                    continue
                self.cluster.edit(
                    BY_NAME[kind],
                    NAMESPACE,
                    name,
                    lambda b, s=status: b.update(status=s),
                    "gateway",
                )


def _is_ours(body: Obj) -> bool:
    return bool(body["metadata"].get("labels", {}).get(MANAGED_BY) == FIELD_MANAGER)


def _is_kept(key: str, body: Obj, used: str, good: str) -> bool:
    """Kept for a way back: documents that no pod uses, devices of the last good revision, profiles,
    Jobs; and the model's claim, which outlives everything; and the rollout's memory, which speaks
    of the way here."""
    kind, _, name = key.partition("/")
    if kind == "ResourceClaimTemplate":
        return name not in used and name in good
    if kind == "ConfigMap":
        return (bool(body.get("immutable")) and name not in used) or name.endswith("-rollout")
    return kind in ("PersistentVolumeClaim", "Job") and name not in used


def _normal(body: Obj) -> Obj:
    plain = {k: copy.deepcopy(v) for k, v in body.items() if k not in ("metadata", "status")}
    kept = ("name", "labels", "annotations", "ownerReferences")
    plain["metadata"] = {k: copy.deepcopy(v) for k, v in body["metadata"].items() if k in kept}
    for owner in plain["metadata"].get("ownerReferences", ()):
        owner["uid"] = "UID"
    if "claim" in plain.get("data", {}):
        plain["data"]["claim"] = "UID"
    if body["kind"] == "Secret":
        plain["stringData"] = plain["data"] = None
    return plain


def _node() -> Obj:
    amounts = {"cpu": "256", "memory": "2048Gi", "pods": "500"}
    amounts |= {"nvidia.com/gpu": "64", "amd.com/gpu": "64"}
    labels = {"nvidia.com/gpu.memory": "81920", "amd.com/gpu.vram": "80G"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "node", "labels": labels},
        "status": {"allocatable": amounts},
    }


def _devices() -> Obj:
    device = {"name": "gpu-0", "capacity": {"memory": {"value": "80Gi"}}}
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
    return {**body, "metadata": {"name": "node-gpus"}, "spec": {"devices": [device]}}


def _claim(name: str) -> Obj:
    metadata = {"name": name, "namespace": NAMESPACE}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
    return {**claim, "status": {"phase": "Bound"}}
