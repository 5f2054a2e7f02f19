"""From a model's uri to its profile: fetch, profile, remember. Pure.

Called by the reconciler before the budgets; it applies `objects` and deletes `delete`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from foveal_operator import reasons
from foveal_operator.manifests import ClusterFacts, Owned
from foveal_operator.reasons import Reason
from foveal_operator.spec import InferenceSpec
from foveal_runtime.plan.profile import ModelProfile

Obj = Mapping[str, Any]


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """What the reconciler has read.

    Attributes:
        live: (kind, name) -> object, for every key of `model_keys`.
        job_pods: pods of the resource's Jobs (label app.kubernetes.io/component=model).
        now: seconds since the epoch.
    """

    inference: InferenceSpec
    facts: ClusterFacts
    live: Mapping[tuple[str, str], Obj] = {}
    job_pods: tuple[Obj, ...] = ()
    now: float


class ModelDecision(msgspec.Struct, frozen=True, kw_only=True):
    """Where the model stands and what to do for it.

    Attributes:
        profile: None until it is known; the plan needs it.
        reason, message: for status.Observed.model and model_message.
        model_ready: for ClusterFacts.model_ready.
        objects: to apply by their policy: account, claim, Jobs, the profile's ConfigMap.
        delete: (kind, name, uid) of Jobs to delete (background) so that they run again.
        next_check_seconds: decide again after so long; None = no need.
    """

    profile: ModelProfile | None = None
    reason: Reason = reasons.WAITING
    message: str = ""
    model_ready: bool = False
    objects: tuple[Owned, ...] = ()
    delete: tuple[tuple[str, str, str], ...] = ()
    next_check_seconds: float | None = None


def model_keys(inference: InferenceSpec, facts: ClusterFacts) -> tuple[tuple[str, str], ...]:
    """(kind, name) of all that ModelView.live should hold."""
    raise NotImplementedError


def decide_model(view: ModelView) -> ModelDecision:
    """The next step towards a profile; the same view gives the same decision."""
    raise NotImplementedError
