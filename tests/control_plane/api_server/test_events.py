"""Events as the API server takes and keeps them: one object for a reason in ten minutes (G24)."""

from __future__ import annotations

import pytest

from foveal_operator.kube.cluster import KubeCluster, load_configuration
from foveal_operator.kube.events import WINDOW_SECONDS, EventRecorder
from foveal_operator.kube.types import Obj
from foveal_operator.telemetry.series import Telemetry
from tests.support.api_server.api import Api
from tests.support.api_server.programs import Cluster, wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.fake_clock import FakeTime
from tests.support.samples import LEGAL, put

STEP_SECONDS = 15.0


async def test_what_happens_all_the_time_is_one_object_that_counts(
    api: Api, cluster: Cluster, namespace: str
) -> None:
    """The operator's own recorder, over 25 minutes that take no time."""
    resource = api.create(put(LEGAL["cpu"], "metadata.namespace", namespace)).must()
    time = FakeTime()
    # A full window begins: then the first lasts as long as the others.
    time.now += WINDOW_SECONDS - time.clock.wall().timestamp() % WINDOW_SECONDS
    client = KubeCluster(await load_configuration(str(cluster.kubeconfig("events"))), Telemetry())
    try:
        recorder = EventRecorder(client, time.clock, "a")
        num_said = int(2.5 * WINDOW_SECONDS / STEP_SECONDS)
        for _ in range(num_said):
            await recorder.record(resource, "Warning", "BudgetMisfit", "It does not fit.")
            time.now += STEP_SECONDS
    finally:
        await client.close()
    events = api.list("Event", namespace)
    assert len(events) == 3
    for event in events:
        assert event["reason"] == "BudgetMisfit"
        assert event["regarding"]["name"] == "qwen"
    counts = sorted(event["series"]["count"] for event in events)
    # Told at most once a minute: what came after the last telling is not in it.
    assert num_said - 3 * 4 <= sum(counts) <= num_said, counts


def told(sandbox: Sandbox) -> list[Obj]:
    return [
        event for event in sandbox.api.list("Event", sandbox.namespace)
        if event.get("regarding", {}).get("kind") == "MultiModalInference"
    ]  # fmt: skip


@pytest.mark.timeout(300, func_only=True)
def test_a_resource_that_flaps_makes_one_object_for_each_reason(sandbox: Sandbox) -> None:
    sandbox.operator("a", NO_LEASE).start()
    good = sandbox.sample("cpu")
    bad = put(good, "spec.engine.hostMemory", "512Mi")
    for obj, value in [(bad, "False"), (good, "True")] * 3:
        sandbox.apply(obj)
        sandbox.wait_condition("BudgetFits", value)
    wait_until("it was told", lambda: any(e["reason"] == "BudgetMisfit" for e in told(sandbox)), 20)
    reasons = [event["reason"] for event in told(sandbox)]
    assert len(reasons) == len(set(reasons)), reasons
    misfit = next(event for event in told(sandbox) if event["reason"] == "BudgetMisfit")
    assert misfit["type"] == "Warning"
    assert "spec.engine.hostMemory" in misfit["note"]
