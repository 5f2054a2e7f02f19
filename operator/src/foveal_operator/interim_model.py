"""Until model_flow is there: a profile in ConfigMap NAME-profile, or the Job that makes one."""

from __future__ import annotations

from foveal_operator import reasons
from foveal_operator.manifests import ClusterFacts, Owned, desired
from foveal_operator.manifests.context import Context
from foveal_operator.model_flow import ModelDecision, ModelView
from foveal_operator.spec import InferenceSpec
from foveal_runtime.plan.profile import decode


def model_keys(inference: InferenceSpec, facts: ClusterFacts) -> tuple[tuple[str, str], ...]:
    return (("ConfigMap", f"{inference.name}-profile"),)


def decide_model(view: ModelView) -> ModelDecision:
    objects = desired(view.inference, None, view.facts).objects
    body = view.live.get(("ConfigMap", f"{view.inference.name}-profile"))
    text = body["data"]["profile.json"] if body else ""
    for pod in view.job_pods:
        for status in pod.get("status", {}).get("containerStatuses", ()):
            ended = status.get("state", {}).get("terminated")
            if status["name"] == "profile" and ended and ended["exitCode"] == 0:
                text = text or ended["message"]
    if not text:
        return ModelDecision(reason=reasons.PROFILING, objects=objects)
    context = Context(inference=view.inference, plan=None, facts=view.facts)
    kept = context.object("v1", "ConfigMap", "profile", "model", data={"profile.json": text})
    return ModelDecision(
        profile=decode(text.encode()),
        reason=reasons.RESOLVED,
        model_ready=True,
        objects=(*(o for o in objects if o.body["kind"] != "Job"), Owned(body=kept)),
    )
