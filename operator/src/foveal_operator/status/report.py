"""The status of a resource from observed objects, by a pure function.

Called by the reconciler after every pass. Never an input of anything. Conditions are those of
verdicts.py. Time comes in as text.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from foveal_operator.api.parse import InferenceSpec, SpecError
from foveal_operator.api.status import (
    Budget,
    Condition,
    Failure,
    ModelStatus,
    MultiModalInferenceStatus,
)
from foveal_operator.kube.types import Obj, label_of
from foveal_operator.manifests import Desired
from foveal_operator.manifests.pods import REVISION_LABEL
from foveal_operator.pods.diagnose import is_ready, last_failure
from foveal_operator.status.conditions import to_conditions
from foveal_operator.status.verdicts import (
    Observed,
    role_status,
    verdicts,
    wanted_revision,
)
from foveal_runtime.plan.budget.types import BudgetPlan, Line, PlaceBudget
from foveal_runtime.plan.profile import ModelProfile
from foveal_runtime.plan.quantity import format_gib


def report(
    inference: InferenceSpec | None,
    error: SpecError | None,
    plan: BudgetPlan | None,
    desired: Desired | None,
    observed: Observed,
    generation: int,
    previous: tuple[Condition, ...] = (),
) -> MultiModalInferenceStatus:
    """The whole status. Exactly one of `inference` and `error` is None.

    Pods of an earlier spec are still counted when the present one is refused.
    """
    assert (inference is None) != (error is None)
    frontend = role_status(observed.deployment, observed.frontend_pods, desired, "Deployment")
    engine = role_status(observed.stateful_set, observed.engine_pods, desired, "StatefulSet")
    found = verdicts(inference, error, plan, desired, observed, frontend, engine, previous)
    return MultiModalInferenceStatus(
        observed_generation=generation,
        conditions=to_conditions(found, generation, observed.now, previous),
        url=_url(inference),
        frontend=frontend,
        engine=engine,
        budgets=budgets(plan, observed.reports.measured) if plan else {},
        current_revision=_serving_revision(observed.engine_pods),
        update_revision=wanted_revision(desired, "StatefulSet"),
        rendered_config_map=_config_map(desired),
        rendered_config_hash=_config_map(desired).rpartition("-")[2],
        rollout_strategy=observed.rollout.strategy,
        last_failure=_last_failure(observed, desired),
        model=ModelStatus(
            resolved_revision=observed.image_digest or observed.model.resolved_revision,
            download_percent=observed.model.download_percent,
            modalities=_modalities(inference, observed.model.profile),
        ),
        resolved=_resolved(inference, desired),
    )


def _last_failure(observed: Observed, desired: Desired | None) -> Failure | None:
    """Of any pod: engine, frontend, or of a Job that is not through. Pods that have ended count in
    the present revision: a Deployment keeps them for long."""
    wanted = {wanted_revision(desired, kind) for kind in ("StatefulSet", "Deployment")} - {""}
    ended = [pod for pod in observed.failed_pods if label_of(pod, REVISION_LABEL) in wanted]
    pods = (*observed.engine_pods, *observed.frontend_pods, *ended)
    serving = last_failure(pods, observed.reports.peaks)
    found = [one for one in (serving, observed.model.failure) if one is not None]
    return max(found, key=lambda one: one.time or "", default=None)


def _serving_revision(pods: Iterable[Obj]) -> str:
    """The revision that most ready pods have."""
    found = sorted(label_of(pod, REVISION_LABEL) for pod in pods if is_ready(pod))
    return max(found, key=found.count, default="")


def budgets(plan: BudgetPlan, measured: dict[str, int]) -> dict[str, Budget]:
    """The product's block: each cache, weights, shm and every limit, with its formula."""
    found = {}
    for place in plan.places:
        for line in place.lines:
            if line.is_cache or line.name == "weights":
                found[line.name] = _budget(line, measured.get(line.name))
        if place.place == "engine":
            found["shm"] = _budget(place.line("shm"), measured.get("shm"))
        name = "deviceMemory" if place.place == "device" else f"{place.place}PodMemory"
        found[name] = _limit(place, measured.get(name))
    return dict(sorted(found.items()))


def _budget(line: Line, measured: int | None) -> Budget:
    return Budget(
        bytes=line.each_bytes,
        display=format_gib(line.each_bytes),
        measured_bytes=measured,
        difference_bytes=None if measured is None else measured - line.each_bytes,
        items=line.num_items or None,
        source=line.source,
        formula=line.formula[:512],
    )


def _limit(place: PlaceBudget, measured: int | None) -> Budget:
    terms = " + ".join(line.name for line in place.lines if line.bytes)
    return Budget(
        bytes=place.limit_bytes,
        display=format_gib(place.limit_bytes),
        measured_bytes=measured,
        difference_bytes=None if measured is None else measured - place.limit_bytes,
        source=place.source,
        formula=f"{terms} + headroom"[:512],
    )


def _url(inference: InferenceSpec | None) -> str:
    if inference is None:
        return ""
    port = inference.spec.networking.port
    return f"http://{inference.name}.{inference.namespace}.svc:{port}/v1"


def _config_map(desired: Desired | None) -> str:
    for body in desired.of_kind("ConfigMap") if desired else ():
        if "engine.json" in body.get("data", {}):
            return str(body["metadata"]["name"])
    return ""


def _modalities(inference: InferenceSpec | None, profile: ModelProfile | None) -> tuple[str, ...]:
    """What is allowed, and, once the profile tells, what of it the model takes."""
    if inference is None:
        return ()
    limits = inference.spec.modalities
    names = [name for name in ("image", "video", "audio") if getattr(limits, name).max_per_prompt]
    return tuple(name for name in names if profile is None or name in profile.items)


def _resolved(inference: InferenceSpec | None, desired: Desired | None) -> dict[str, object]:
    """The operator's defaults as applied: every field of these parts, whether given or not.

    Left out is what has no default and may be large: the pods' templates.
    """
    if inference is None:
        return {}
    spec = inference.spec
    engine = msgspec.structs.replace(spec.engine, pod_template={})
    if engine.accelerator.type != "CPU":
        devices = msgspec.structs.replace(engine.accelerator, count=engine.num_devices)
        parallelism = msgspec.structs.replace(engine.parallelism, tensor=engine.num_devices)
        engine = msgspec.structs.replace(engine, accelerator=devices, parallelism=parallelism)
    parts = {
        "modalities": spec.modalities,
        "frontend": msgspec.structs.replace(spec.frontend, pod_template={}),
        "engine": engine,
        "caches": spec.caches,
        "rollout": spec.rollout,
        "networking": spec.networking,
        "security": spec.security,
        "observability": spec.observability,
    }
    found = {name: plain(part) for name, part in parts.items()}
    for body in desired.of_kind("StatefulSet") if desired else ():
        found["image"] = body["spec"]["template"]["spec"]["containers"][0]["image"]
    found["maxFrontends"] = inference.num_frontends
    found["maxEngines"] = inference.num_engines
    return found


def plain(value: object) -> object:
    """JSON as the API server takes it: camel case, zeros kept, what is not set left out.

    Empty maps are left out as well: sent after a filled one, server-side apply makes them null,
    which the schema then refuses.
    """
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        pairs = ((key, plain(getattr(value, name))) for key, name in names)
        return {key: item for key, item in pairs if item is not None and item != {}}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value
