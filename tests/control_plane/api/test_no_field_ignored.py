"""No field of the resource is silently ignored: each one changes an object, a budget or a rollout.

Walks the generated schema, so a new field fails here until it has a sample and an effect.
"""

from __future__ import annotations

import msgspec
import pytest

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.manifests import desired
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_runtime.plan.budget.planner import plan
from foveal_runtime.plan.config import GIB
from tests.support.regenerate import FACTS, profile_for
from tests.support.spec_fields import LEAVES, VALUES, base_for, changed

# Read by the rollout and by the reconciler, which act over time: no object shows them.
OVER_TIME = {
    "spec.rollout.strategy",
    "spec.rollout.maxSurge",
    "spec.rollout.maxUnavailable",
    "spec.rollout.autoRollback",
    "spec.paused",
}
# Changes the plan only when something does not fit: test_budget.py.
ON_MISFIT = {"spec.caches.onMisfit"}


def effect(obj: Obj) -> bytes:
    inference = parse(obj)
    inputs = budget_inputs(inference, NodeFacts(device_bytes=80 * GIB))
    result = plan(inputs, profile_for(inference))
    objects = desired(inference, result, FACTS)
    before = desired(inference, None, FACTS)  # the profile Job is only there without a plan
    return msgspec.json.encode([objects, before], order="deterministic")


@pytest.mark.parametrize("path", sorted(set(LEAVES) - OVER_TIME - ON_MISFIT))
def test_a_field_has_an_effect(path: str) -> None:
    before = base_for(path)
    assert effect(changed(before, path)) != effect(before), f"{path} is ignored"


def test_the_exceptions_exist() -> None:
    assert set(LEAVES) >= OVER_TIME | ON_MISFIT | set(VALUES)
