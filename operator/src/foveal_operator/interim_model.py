"""Until model_flow is there: a profile in ConfigMap NAME-profile, or the Job that makes one."""

from __future__ import annotations

from foveal_operator import reasons
from foveal_operator.manifests import ClusterFacts, desired
from foveal_operator.model_flow import ModelDecision, ModelView
from foveal_operator.spec import InferenceSpec
from foveal_runtime.plan.profile import decode


def model_keys(inference: InferenceSpec, facts: ClusterFacts) -> tuple[tuple[str, str], ...]:
    return (("ConfigMap", f"{inference.name}-profile"),)


def decide_model(view: ModelView) -> ModelDecision:
    objects = desired(view.inference, None, view.facts).objects
    body = view.live.get(("ConfigMap", f"{view.inference.name}-profile"))
    if body is None:
        return ModelDecision(reason=reasons.PROFILING, objects=objects)
    kept = tuple(o for o in objects if o.body["kind"] != "Job")
    return ModelDecision(
        profile=decode(body["data"]["profile.json"].encode()),
        reason=reasons.RESOLVED,
        model_ready=True,
        objects=kept,
    )
