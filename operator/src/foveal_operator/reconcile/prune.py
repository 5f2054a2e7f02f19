"""Owned objects that are no longer desired or used. Effect-free.

One answer for two askers: the reconciler deletes them, after a live read; `foveal plan --server`
lists those that will have gone when the change is through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from foveal_operator.kube.kinds import CONFIG_MAP, DEPLOYMENT, KINDS, STATEFUL_SET, Kind
from foveal_operator.kube.store import Caches
from foveal_operator.kube.types import Obj, ObjectKey
from foveal_operator.manifests.context import Owned
from foveal_operator.model.flow import PROFILE_KEY, model_keys
from foveal_operator.reconcile.apply import is_controlled_by
from foveal_operator.reconcile.baseline import basis_name
from foveal_operator.reconcile.decide import Decision
from foveal_operator.rollout import objects_in_use, record_name

REVISIONS_KEPT = 3
_DOCUMENTS = ("engine.json", "frontend.json", PROFILE_KEY)
_LAST = "9999-12-31T23:59:59Z"


def unwanted_now(work: Decision, caches: Caches) -> list[tuple[Kind, Obj]]:
    """What this pass may delete, its own objects having been applied; nothing while something is
    missing that the whole plan needs."""
    key = work.key
    workloads = [
        work.rollout.stateful_set,
        work.rollout.deployment,
        caches.get(STATEFUL_SET, key[0], f"{key[1]}-engine"),
        caches.get(DEPLOYMENT, key[0], f"{key[1]}-frontend"),
    ]
    templates = [workload["spec"]["template"] for workload in workloads if workload is not None]
    kept = _keys(work, (*work.model.objects, *work.desired.objects))
    kept |= objects_in_use((*templates, *work.serving_pods)) | work.rollout.keep
    return _unwanted(work, caches, kept, lambda: caches.owned(CONFIG_MAP, key))


def unwanted_in_the_end(work: Decision, caches: Caches) -> list[tuple[Kind, Obj]]:
    """The same for when every pod has the wanted templates, and the model its profile."""
    workloads = (*work.desired.of_kind("StatefulSet"), *work.desired.of_kind("Deployment"))
    templates = [workload["spec"]["template"] for workload in workloads]
    # Jobs that have ended go by themselves.
    kept = _keys(work, (*work.desired.objects, *work.model.objects))
    kept |= objects_in_use(templates)
    live = {body["metadata"]["name"]: body for body in caches.owned(CONFIG_MAP, work.key)}
    records = [name for kind, name in model_keys(work.inference, work.facts) if kind == "ConfigMap"]
    made = [*work.desired.of_kind("ConfigMap")]
    made += [
        {"metadata": {"name": name}, "data": {PROFILE_KEY if "-profile-" in name else "": ""}}
        for name in records
    ]
    for body in made:
        name = body["metadata"]["name"]
        new = {**body, "metadata": {"name": name, "creationTimestamp": _LAST}}
        live.setdefault(name, new)
        kept.add(("ConfigMap", name))
    return _unwanted(work, caches, kept, live.values)


def _keys(work: Decision, objects: Iterable[Owned]) -> set[ObjectKey]:
    found = {(owned.body["kind"], str(owned.body["metadata"]["name"])) for owned in objects}
    return found | {("ConfigMap", basis_name(work.key[1])), ("ConfigMap", record_name(work.key[1]))}


def _unwanted(
    work: Decision, caches: Caches, kept: set[ObjectKey], config_maps: Callable[[], Iterable[Obj]]
) -> list[tuple[Kind, Obj]]:
    if not work.desired.complete:
        return []
    spare = [
        (kind, name)
        for kind in KINDS
        if kind.pruned and kind.watched
        for name in caches.owned_names(kind, work.key)
        if (kind.name, name) not in kept
    ]
    if not spare:
        return []
    listed = list(config_maps())
    for document in _DOCUMENTS:
        kept |= {("ConfigMap", name) for name in _newest(listed, document, REVISIONS_KEPT)}
    found = (
        (kind, caches.get(kind, work.key[0], name))
        for kind, name in spare
        if (kind.name, name) not in kept
    )
    return [
        (kind, body)
        for kind, body in found
        if body is not None
        and not body["metadata"].get("deletionTimestamp")
        and is_controlled_by(body, work.uid)
    ]


def _newest(config_maps: Iterable[Obj], document: str, num_kept: int) -> set[str]:
    """Names of the youngest ConfigMaps that hold this start-up document."""
    found = [body for body in config_maps if document in (body.get("data") or {})]
    found.sort(key=lambda b: (b["metadata"].get("creationTimestamp", ""), b["metadata"]["name"]))
    return {body["metadata"]["name"] for body in found[-num_kept:]}
