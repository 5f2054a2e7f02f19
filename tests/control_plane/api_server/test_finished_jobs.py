"""Finished Jobs are removed by the cluster's own controller, and nothing is done again for it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from foveal_operator.model.job_state import RECORDED, TTL_SECONDS
from tests.support.api_server import nodes as fates
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox, claim_in
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.regenerate import profile_for


def jobs(sandbox: Sandbox) -> list[Obj]:
    return sandbox.api.list("Job", sandbox.namespace)


@pytest.mark.timeout(300, func_only=True)
def test_jobs_that_the_cluster_removes_leave_a_resource_as_it_was(sandbox: Sandbox) -> None:
    """The time to live is shortened, as a policy of the cluster may; the controller is the real
    one, and takes the pods along."""
    resource = sandbox.sample("cpu", model={"uri": "hf://org/tiny", "cache": {"size": "1Gi"}})
    profile = msgspec.json.encode(profile_for(parse(resource))).decode()
    sandbox.nodes.fate(replace(fates.SUCCEEDED, message=profile), component="model")
    sandbox.operator("a", NO_LEASE).start()
    sandbox.api.create(claim_in(sandbox.namespace))
    sandbox.api.apply(resource, "user").must()
    sandbox.wait_condition("Ready")
    wait_until(
        "each Job's result is recorded",
        lambda: all(RECORDED in one["metadata"].get("annotations", {}) for one in jobs(sandbox)),
        30,
    )
    found = jobs(sandbox)
    assert len(found) == 2, "one fetches and one makes the profile"
    assert {one["spec"]["ttlSecondsAfterFinished"] for one in found} == {TTL_SECONDS}
    sandbox.settled()
    before = (sandbox.resource() or {})["status"]["conditions"]
    engines = {pod["metadata"]["uid"] for pod in sandbox.nodes.pods("engine")}
    for one in found:
        change = {"spec": {"ttlSecondsAfterFinished": 1}}
        sandbox.api.merge("Job", sandbox.namespace, one["metadata"]["name"], change).must()
    wait_until("the Jobs have gone", lambda: not jobs(sandbox), 60)
    wait_until("and their pods", lambda: not sandbox.nodes.pods("model"), 60)
    sandbox.settled(quiet_seconds=6.0)
    assert jobs(sandbox) == [], "nothing is fetched or profiled again"
    assert (sandbox.resource() or {})["status"]["conditions"] == before
    assert {pod["metadata"]["uid"] for pod in sandbox.nodes.pods("engine")} == engines
