"""From any spec to any other and back: what stands there is that of a fresh start.

Generated pairs (A, B): A then B then A, beside an empty cluster that goes straight to B. The seed is
printed; FOVEAL_SEED=N replays it, FOVEAL_TRANSITIONS=N sets how many transitions there are.
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from tests.control_plane.api_server_rules import problems
from tests.control_plane.playground import NAME, Playground
from tests.control_plane.samples import LEGAL, Obj, put, resource
from tests.control_plane.spec_strategies import bad_specs, is_allowed, specs

from foveal_operator.kinds import INFERENCE

SEED = int(os.environ.get("FOVEAL_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
FEW, MANY = 24, int(os.environ.get("FOVEAL_TRANSITIONS", "500"))
State = tuple[dict[str, Obj], Obj]


def state(playground: Playground) -> State:
    return playground.objects(), playground.told()


def without_replicas(found: State, spec: Obj) -> State:
    """How many pods there are, an autoscaler says: it begins with what it finds."""
    objects, told = copy.deepcopy(found)
    for role, key in (("frontend", "Deployment"), ("engine", "StatefulSet")):
        if not (spec.get(role) or {}).get("autoscaling"):
            continue
        objects.get(f"{key}/{NAME}-{role}", {}).get("spec", {}).pop("replicas", None)
        told.pop(role, None)
        told.pop("conditions", None)
        objects = {k: v for k, v in objects.items() if not k.startswith("PodDisruptionBudget")}
    return objects, told


def assert_equal(found: State, expected: State, spec: Obj, what: str) -> None:
    found, expected = without_replicas(found, spec), without_replicas(expected, spec)
    assert found[0].keys() == expected[0].keys(), what
    for key, body in expected[0].items():
        assert found[0][key] == body, f"{what}: {key}"
    assert found[1] == expected[1], what


async def there_and_back(before: Obj, after: Obj) -> None:
    """Two transitions, three comparisons."""
    travelled, fresh = Playground(), Playground()
    await travelled.become(before)
    first = state(travelled)
    await travelled.become(after)
    await fresh.become(after)
    assert_equal(state(travelled), state(fresh), after, "A then B is not B")
    if is_allowed(after, before):
        await travelled.become(before)
        assert_equal(state(travelled), first, before, "A then B then A is not A")


def run_transitions(num: int) -> None:
    """Hypothesis shrinks what fails and prints both specs."""
    count = [0]

    @seed(SEED)
    @settings(
        max_examples=num // 2,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(before=specs(), after=specs())
    def transition(before: Obj, after: Obj) -> None:
        assume(before != after and is_allowed(before, after))
        asyncio.run(there_and_back(before, after))
        count[0] += 1 + is_allowed(after, before)

    print(f"seed {SEED}")
    try:
        transition()
    except AssertionError as error:
        raise AssertionError(f"FOVEAL_SEED={SEED}: {error}") from error
    print(f"{count[0]} transitions")


def test_some_transitions_end_where_a_fresh_start_does() -> None:
    run_transitions(FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_500_transitions_end_where_a_fresh_start_does() -> None:
    run_transitions(MANY)


@pytest.mark.parametrize("name", ["gpu", "cpu"])
@pytest.mark.parametrize(("what", "changes"), bad_specs(), ids=[n for n, _ in bad_specs()])
async def test_a_bad_spec_is_told_and_taken_back(
    name: str, what: str, changes: dict[str, Any]
) -> None:
    """Pods that serve live on while the spec is bad; taking it back leaves nothing of it."""
    playground = Playground()
    good = LEGAL[name]["spec"]
    bad = {**resource(NAME), "spec": copy.deepcopy(good)}
    for path, value in changes.items():
        bad = put(bad, path, value)
    assert not problems(bad), "the API server takes it"
    await playground.become(good)
    first = state(playground)
    uids = {pod["metadata"]["uid"] for pod in playground.pods("frontend")}
    await playground.become(bad["spec"])
    assert playground.condition("Ready")[0] == "False", what
    assert playground.cluster.body(INFERENCE.name, NAME, "models")["status"]["conditions"]
    if "image" not in changes:
        assert {pod["metadata"]["uid"] for pod in playground.pods("frontend")} >= uids
    await playground.become(good)
    assert_equal(state(playground), first, good, what)
