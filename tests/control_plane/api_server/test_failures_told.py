"""What goes wrong with pods is told with its reason; a bad spec or a new operator harms no pod."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from foveal_operator.api import reasons
from foveal_operator.api.parse import parse
from foveal_operator.api.reasons import Reason
from tests.support.api_server import nodes as fates
from tests.support.api_server.nodes import Fate
from tests.support.api_server.programs import wait_until
from tests.support.api_server.scenarios import NO_LEASE, STEPS, Step, run
from tests.support.api_server.world import World, claim_in
from tests.support.regenerate import profile_for

CREATE, SCALE = STEPS[:2]
WORKERS = Step(
    "media workers",
    lambda world: world.apply(world.sample("cpu", frontend__replicas=2, frontend__mediaWorkers=3)),
    num_frontends=2,
)


def pod_uids(world: World, component: str = "") -> set[str]:
    return {pod["metadata"]["uid"] for pod in world.nodes.pods(component)}


def condition(world: World, kind: str) -> dict[str, Any]:
    """{} until the status speaks of the present spec."""
    obj = world.resource() or {}
    status = obj.get("status", {})
    if status.get("observedGeneration") != obj.get("metadata", {}).get("generation"):
        return {}
    found = [c for c in status.get("conditions", ()) if c["type"] == kind]
    return dict(found[0]) if found else {}


def wait_reason(world: World, kind: str, reason: Reason) -> dict[str, Any]:
    try:
        wait_until(
            f"{kind} is {reason.name}",
            lambda: condition(world, kind).get("reason") == reason.name,
            90.0,
        )
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{world.told()}") from None
    return condition(world, kind)


CASES: list[tuple[str, Fate, str, Reason, int]] = [
    ("engine", fates.OUT_OF_MEMORY, "EnginesReady", reasons.OOM_KILLED, 137),
    ("engine", fates.CRASH, "EnginesReady", reasons.CRASHED, 1),
    ("engine", fates.UNSCHEDULABLE, "EnginesReady", reasons.UNSCHEDULABLE, 0),
    ("frontend", fates.IMAGE_PULL, "FrontendsReady", reasons.IMAGE_PULL, 0),
]


@pytest.mark.timeout(600, func_only=True)
def test_each_failure_has_its_reason_and_goes_when_it_goes(world: World) -> None:
    """One resource, one failure after the other; between them all is well again."""
    world.operator("a", NO_LEASE).start()
    run(world, CREATE)
    for component, fate, kind, reason, exit_code in CASES:
        world.nodes.fate(fate, component=component)
        if fate.phase == "Pending":  # only a new pod can wait for a node or an image
            pod = world.nodes.pods(component)[0]["metadata"]
            world.api.delete("Pod", world.namespace, pod["name"]).must()
        told = wait_reason(world, kind, reason)
        assert told["status"] == "False"
        assert told["message"]
        assert condition(world, "Ready")["status"] == "False"
        if exit_code:
            last = (world.resource() or {})["status"]["lastFailure"]
            assert last["exitCode"] == exit_code
            assert last["pod"] in {p["metadata"]["name"] for p in world.nodes.pods(component)}
        world.nodes.fate(fates.READY, component=component)
        wait_reason(world, kind, reasons.SERVING)


@pytest.mark.timeout(300, func_only=True)
def test_a_job_that_fails_is_told_with_its_pod(world: World) -> None:
    """Real Jobs: the controller makes a new pod for each attempt, and leaves the failed ones."""
    world.operator("a", NO_LEASE).start()
    last_words = "a log line\nfoveal-runtime: model type mamba is not supported"
    world.nodes.fate(replace(fates.FAILED, exit_code=2, message=last_words), component="model")
    world.api.create(claim_in(world.namespace))
    world.api.apply(world.sample("cpu"), "user").must()
    wait_reason(world, "ModelReady", reasons.UNSUPPORTED_MODEL)
    (job,) = world.api.list("Job", world.namespace)
    failure = (world.resource() or {})["status"]["lastFailure"]
    assert failure["pod"].startswith(job["metadata"]["name"])
    assert (failure["container"], failure["reason"]) == ("profile", "UnsupportedModel")
    assert failure["exitCode"] == 2
    assert failure["message"] == "foveal-runtime: model type mamba is not supported"
    profile = msgspec.json.encode(profile_for(parse(world.sample("cpu")))).decode()
    world.nodes.fate(replace(fates.SUCCEEDED, message=profile), component="model")
    wait_reason(world, "ModelReady", reasons.RESOLVED)
    world.wait_condition("Ready")
    assert "lastFailure" not in (world.resource() or {})["status"], "the Job has ended well"


BAD = [
    ("does not fit", {"engine__hostMemory": "512Mi"}, "BudgetFits"),
    (
        "touches what is derived",
        {"engine__podTemplate": {"spec": {"containers": [{"name": "engine", "ports": []}]}}},
        "SpecAccepted",
    ),
]


@pytest.mark.timeout(600, func_only=True)
def test_a_bad_spec_leaves_what_runs_alone(world: World) -> None:
    world.operator("a", NO_LEASE).start()
    children = run(world, CREATE)
    pods = pod_uids(world)
    for _, change, kind in BAD:
        world.apply(world.sample("cpu", **change))
        wait_until(f"{kind}=False", lambda k=kind: condition(world, k).get("status") == "False", 60)
        assert condition(world, "Stalled").get("status") == "True"
        assert world.children() == children
    run(world, CREATE)
    assert not condition(world, "Stalled")
    assert pod_uids(world) == pods


@pytest.mark.timeout(600, func_only=True)
def test_neither_a_frontend_change_nor_a_new_operator_restarts_engines(world: World) -> None:
    operator = world.operator("a", NO_LEASE)
    operator.start()
    run(world, CREATE)
    engines = pod_uids(world, "engine")
    run(world, SCALE)
    # Until all is ready again: on a busy machine the operator may rest in the midst of a rollout.
    run(world, WORKERS)
    assert pod_uids(world, "engine") == engines
    pods, versions = pod_uids(world), world.versions()
    operator.stop()
    newer = world.operator("b", NO_LEASE, "--runtime-image=registry.example/next:2")
    newer.start()
    newer.wait_ready()
    world.settled(quiet_seconds=6.0)
    assert world.versions() == versions
    assert pod_uids(world) == pods
