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
from tests.support.api_server.sandbox import Sandbox, claim_in
from tests.support.api_server.scenarios import NO_LEASE, STEPS, Step, run
from tests.support.regenerate import profile_for

CREATE, SCALE = STEPS[:2]
WORKERS = Step(
    "media workers",
    lambda sandbox: sandbox.apply(
        sandbox.sample("cpu", frontend__replicas=2, frontend__mediaWorkers=3)
    ),
    num_frontends=2,
)


def pod_uids(sandbox: Sandbox, component: str = "") -> set[str]:
    return {pod["metadata"]["uid"] for pod in sandbox.nodes.pods(component)}


def condition(sandbox: Sandbox, kind: str) -> dict[str, Any]:
    """{} until the status speaks of the present spec."""
    obj = sandbox.resource() or {}
    status = obj.get("status", {})
    if status.get("observedGeneration") != obj.get("metadata", {}).get("generation"):
        return {}
    found = [c for c in status.get("conditions", ()) if c["type"] == kind]
    return dict(found[0]) if found else {}


def wait_reason(sandbox: Sandbox, kind: str, reason: Reason) -> dict[str, Any]:
    try:
        wait_until(
            f"{kind} is {reason.name}",
            lambda: condition(sandbox, kind).get("reason") == reason.name,
            90.0,
        )
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{sandbox.told()}") from None
    return condition(sandbox, kind)


CASES: list[tuple[str, Fate, str, Reason, int]] = [
    ("engine", fates.OUT_OF_MEMORY, "EnginesReady", reasons.OOM_KILLED, 137),
    ("engine", fates.CRASH, "EnginesReady", reasons.CRASHED, 1),
    ("engine", fates.UNSCHEDULABLE, "EnginesReady", reasons.UNSCHEDULABLE, 0),
    ("frontend", fates.IMAGE_PULL, "FrontendsReady", reasons.IMAGE_PULL, 0),
]


@pytest.mark.timeout(600, func_only=True)
def test_each_failure_has_its_reason_and_goes_when_it_goes(sandbox: Sandbox) -> None:
    """One resource, one failure after the other; between them all is well again."""
    sandbox.operator("a", NO_LEASE).start()
    run(sandbox, CREATE)
    for component, fate, kind, reason, exit_code in CASES:
        sandbox.nodes.fate(fate, component=component)
        if fate.phase == "Pending":  # only a new pod can wait for a node or an image
            pod = sandbox.nodes.pods(component)[0]["metadata"]
            sandbox.api.delete("Pod", sandbox.namespace, pod["name"]).must()
        told = wait_reason(sandbox, kind, reason)
        assert told["status"] == "False"
        assert told["message"]
        assert condition(sandbox, "Ready")["status"] == "False"
        if exit_code:
            last = (sandbox.resource() or {})["status"]["lastFailure"]
            assert last["exitCode"] == exit_code
            assert last["pod"] in {p["metadata"]["name"] for p in sandbox.nodes.pods(component)}
        sandbox.nodes.fate(fates.READY, component=component)
        wait_reason(sandbox, kind, reasons.SERVING)


@pytest.mark.timeout(300, func_only=True)
def test_a_job_that_fails_is_told_with_its_pod(sandbox: Sandbox) -> None:
    """Real Jobs: the controller makes a new pod for each attempt, and leaves the failed ones."""
    sandbox.operator("a", NO_LEASE).start()
    last_words = "a log line\nfoveal-runtime: model type mamba is not supported"
    sandbox.nodes.fate(replace(fates.FAILED, exit_code=2, message=last_words), component="model")
    sandbox.api.create(claim_in(sandbox.namespace))
    sandbox.api.apply(sandbox.sample("cpu"), "user").must()
    wait_reason(sandbox, "ModelReady", reasons.UNSUPPORTED_MODEL)
    (job,) = sandbox.api.list("Job", sandbox.namespace)
    failure = (sandbox.resource() or {})["status"]["lastFailure"]
    assert failure["pod"].startswith(job["metadata"]["name"])
    assert (failure["container"], failure["reason"]) == ("profile", "UnsupportedModel")
    assert failure["exitCode"] == 2
    assert failure["message"] == "foveal-runtime: model type mamba is not supported"
    profile = msgspec.json.encode(profile_for(parse(sandbox.sample("cpu")))).decode()
    sandbox.nodes.fate(replace(fates.SUCCEEDED, message=profile), component="model")
    wait_reason(sandbox, "ModelReady", reasons.RESOLVED)
    sandbox.wait_condition("Ready")
    assert "lastFailure" not in (sandbox.resource() or {})["status"], "the Job has ended well"


BAD = [
    ("does not fit", {"engine__hostMemory": "512Mi"}, "BudgetFits"),
    (
        "touches what is derived",
        {"engine__podTemplate": {"spec": {"containers": [{"name": "engine", "ports": []}]}}},
        "SpecAccepted",
    ),
]


@pytest.mark.timeout(600, func_only=True)
def test_a_bad_spec_leaves_what_runs_alone(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE).start()
    children = run(sandbox, CREATE)
    pods = pod_uids(sandbox)
    for _, change, kind in BAD:
        sandbox.apply(sandbox.sample("cpu", **change))
        wait_until(
            f"{kind}=False", lambda k=kind: condition(sandbox, k).get("status") == "False", 60
        )
        assert condition(sandbox, "Stalled").get("status") == "True"
        assert sandbox.children() == children
    run(sandbox, CREATE)
    assert not condition(sandbox, "Stalled")
    assert pod_uids(sandbox) == pods


@pytest.mark.timeout(600, func_only=True)
def test_neither_a_frontend_change_nor_a_new_operator_restarts_engines(sandbox: Sandbox) -> None:
    operator = sandbox.operator("a", NO_LEASE)
    operator.start()
    run(sandbox, CREATE)
    engines = pod_uids(sandbox, "engine")
    run(sandbox, SCALE)
    # Until all is ready again: on a busy machine the operator may rest in the midst of a rollout.
    run(sandbox, WORKERS)
    assert pod_uids(sandbox, "engine") == engines
    pods, versions = pod_uids(sandbox), sandbox.versions()
    operator.stop()
    newer = sandbox.operator("b", NO_LEASE, "--runtime-image=registry.example/next:2")
    newer.start()
    newer.wait_ready()
    sandbox.settled(quiet_seconds=6.0)
    assert sandbox.versions() == versions
    assert pod_uids(sandbox) == pods
