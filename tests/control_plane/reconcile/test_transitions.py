"""From any spec to any other and back: what stands there is that of a fresh start.

Generated pairs (A, B): A then B then A, beside an empty cluster that goes straight to B. A few
have the same seed each time, many a new one. It is printed, and FOVEAL_SEED=N sets it;
FOVEAL_TRANSITIONS=N sets how many transitions there are, and FOVEAL_SHRINK=1 looks for the smallest
pair that fails (minutes).
"""

from __future__ import annotations

import asyncio
import copy
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings

from foveal_operator.kube.kinds import INFERENCE, KINDS
from foveal_operator.kube.types import Obj
from foveal_runtime.plan.quantity import parse_bytes
from tests.support.api_server_rules import problems
from tests.support.instant_cluster import NAME, InstantCluster
from tests.support.samples import LEGAL, put, resource
from tests.support.spec_strategies import BAD, is_allowed, specs

SEED = int(os.environ.get("FOVEAL_SEED", "0"))
SHRINKS = bool(os.environ.get("FOVEAL_SHRINK"))
FEW, MANY = 24, int(os.environ.get("FOVEAL_TRANSITIONS", "560"))
State = tuple[dict[str, Obj], Obj]


def state(instant_cluster: InstantCluster) -> State:
    return instant_cluster.objects(), instant_cluster.told()


def without_replicas(found: State, spec: Obj) -> State:
    """How many pods there are, an autoscaler says: it begins with what it finds."""
    objects, told = copy.deepcopy(found)
    for role, key in (("frontend", "Deployment"), ("engine", "StatefulSet")):
        if not (spec.get(role) or {}).get("autoscaling"):
            continue
        objects.get(f"{key}/{NAME}-{role}", {}).get("spec", {}).pop("replicas", None)
        told.pop(role, None)
        for kind in ("Available", "Ready", "EnginesReady", "FrontendsReady"):
            told["conditions"].pop(kind, None)
        objects = {k: v for k, v in objects.items() if not k.startswith("PodDisruptionBudget")}
    return objects, told


def fits(found: State) -> bool:
    conditions = found[1]["conditions"]
    return bool(conditions.get("BudgetFits", {}).get("status") == "True")


def flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Leaves by path. Lists that apply merges by key have no order of their own."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        keys = [item.get("mountPath") or item.get("name") for item in value]
        if all(keys) and len(set(keys)) == len(keys):
            items = zip(keys, value, strict=True)
    for key, child in items:
        here = f"{path}.{key}"
        if child and isinstance(child, dict | list):
            yield from flat(child, here)
        else:
            yield here, child


def assert_equal(found: State, expected: State, spec: Obj, what: str) -> None:
    """What does not fit leaves alone what runs: then only what is said of it can be equal."""
    found, expected = without_replicas(found, spec), without_replicas(expected, spec)
    pair = [{**objects, "status": told} for objects, told in (found, expected)]
    if not fits(expected):
        kinds = ("SpecAccepted", "BudgetFits", "ModelReady")
        said = [told["conditions"] for _, told in (found, expected)]
        pair = [{kind: one.get(kind) for kind in kinds} for one in said]
    leaves = [dict(flat(one, "")) for one in pair]
    lines = [
        f"{path}: {leaves[0].get(path)!r} instead of {leaves[1].get(path)!r}"
        for path in sorted(leaves[0].keys() | leaves[1].keys())
        if leaves[0].get(path) != leaves[1].get(path)
    ]
    assert not lines, f"{what}:\n" + "\n".join(lines[:40])


def claims(travelled: InstantCluster) -> dict[str, Obj]:
    """By kind/name, also those that no pod uses yet, since the resource did not fit."""
    found = copy.deepcopy(travelled.cluster.objects)
    kind = "PersistentVolumeClaim"
    return {f"{kind}/{key[2]}": body for key, body in found.items() if key[0] == kind}


def with_claims(earlier: dict[str, Obj], fresh: State) -> State:
    """A claim that is there keeps its access mode, and never becomes smaller."""
    objects = copy.deepcopy(fresh[0])
    for key in objects.keys() & earlier.keys():
        there, spec = earlier[key]["spec"], objects[key]["spec"]
        spec["accessModes"] = there["accessModes"]
        sizes = [one["resources"]["requests"] for one in (there, spec)]
        spec["resources"]["requests"] = max(sizes, key=lambda one: parse_bytes(one["storage"]))
    return objects, fresh[1]


async def there_and_back(before: Obj, after: Obj) -> bool:
    """Two transitions, two comparisons. Returns whether `after` fits."""
    travelled, fresh = InstantCluster(), InstantCluster()
    await travelled.become(before)
    first, held = state(travelled), claims(travelled)
    await travelled.become(after)
    await fresh.become(after)
    expected, second = with_claims(held, state(fresh)), state(travelled)
    held = claims(travelled)
    assert_equal(second, expected, after, "A then B is not B")
    if is_allowed(after, before):
        await travelled.become(before)
        back = with_claims(held, first)
        assert_equal(state(travelled), back, before, "A then B then A is not A")
    return fits(state(fresh))


def run_transitions(num: int, number: int) -> None:
    """Hypothesis shrinks what fails and prints both specs."""
    count = {"all": 0, "do not fit": 0}

    @seed(number)
    @settings(
        max_examples=num // 2,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(before=specs(), after=specs())
    def transition(before: Obj, after: Obj) -> None:
        assume(before != after and is_allowed(before, after))
        try:
            was_fit = asyncio.run(there_and_back(before, after))
        except AssertionError as error:
            raise AssertionError(f"{error}\nA = {before}\nB = {after}") from None
        count["all"] += 1 + is_allowed(after, before)
        count["do not fit"] += not was_fit

    print(f"seed {number}")
    try:
        transition()
    except AssertionError as error:
        raise AssertionError(f"FOVEAL_SEED={number}: {error}") from error
    print(f"{count['all']} transitions, {count['do not fit']} of them to what does not fit")


def test_some_transitions_end_where_a_fresh_start_does() -> None:
    run_transitions(FEW, SEED or 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_500_transitions_end_where_a_fresh_start_does() -> None:
    run_transitions(MANY, SEED or random.SystemRandom().randrange(1, 1 << 31))


async def test_without_engines_new_frontends_wait_for_none() -> None:
    """With engine.replicas 0 and another model the frontends kept the old revision for ever: they
    waited for an engine of the new one."""
    after = {**LEGAL["minimal"]["spec"], "engine": {"replicas": 0}}
    await there_and_back(LEGAL["cpu"]["spec"], after)


async def test_the_basis_of_one_accelerator_is_none_of_another() -> None:
    """A resource that began on CPUs was planned for devices of 0 bytes when it came to have some,
    and one that changed from one kind of device to another for the memory of the first."""
    for engine in ({}, {"accelerator": {"resourceName": "amd.com/gpu"}}):
        await there_and_back(LEGAL["cpu"]["spec"], {**LEGAL["minimal"]["spec"], "engine": engine})


async def test_the_basis_of_some_nodes_is_none_of_others() -> None:
    """Facts follow what chooses nodes: those of another pool were kept from before the edit."""
    after = {**LEGAL["gpu"]["spec"]}
    assert "nodeSelector" in after["engine"]["podTemplate"]["spec"]
    await there_and_back(LEGAL["minimal"]["spec"], after)


async def test_larger_devices_restart_nothing_and_serve_what_needs_them() -> None:
    """Plans rest on the nodes of the first day, until only those of today can carry the spec."""
    instant_cluster = InstantCluster()
    spec = {**LEGAL["minimal"]["spec"], "engine": {}}
    await instant_cluster.become(spec)
    engine = f"StatefulSet/{NAME}-engine"
    first = instant_cluster.objects()[engine]
    [nodes] = (kind for kind in KINDS if kind.name == "Node")
    larger = {"nvidia.com/gpu.memory": "163840"}
    instant_cluster.cluster.edit(
        nodes, "", "node", lambda body: body["metadata"]["labels"].update(larger)
    )
    await instant_cluster.kit.operator.inventory.refresh()
    await instant_cluster.become({**spec, "frontend": {"replicas": 2}})
    assert instant_cluster.objects()[engine] == first
    await instant_cluster.become({**spec, "engine": {"accelerator": {"memory": "96Gi"}}})
    assert instant_cluster.condition("BudgetFits")[0] == "True"


@pytest.mark.parametrize("name", ["gpu", "cpu"])
@pytest.mark.parametrize("what", BAD)
async def test_a_bad_spec_is_told_and_taken_back(name: str, what: str) -> None:
    """Pods that serve live on while the spec is bad; taking it back leaves nothing of it."""
    instant_cluster = InstantCluster()
    good = LEGAL[name]["spec"]
    bad = {**resource(NAME), "spec": copy.deepcopy(good)}
    for path, value in BAD[what].items():
        bad = put(bad, path, value)
    assert not problems(bad), "the API server takes it"
    await instant_cluster.become(good)
    first = state(instant_cluster)
    uids = {pod["metadata"]["uid"] for pod in instant_cluster.pods("frontend")}
    await instant_cluster.become(bad["spec"])
    assert instant_cluster.condition("Ready")[0] == "False", what
    assert instant_cluster.cluster.body(INFERENCE.name, NAME, "models")["status"]["conditions"]
    if what != "no such image":
        assert {pod["metadata"]["uid"] for pod in instant_cluster.pods("frontend")} >= uids
    await instant_cluster.become(good)
    assert_equal(state(instant_cluster), first, good, what)
