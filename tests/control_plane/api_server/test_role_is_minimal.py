"""The chart's roles hold what the operator uses and nothing else: one life of a resource uses all.

The operator runs with exactly those roles. Everything that can be asked for is asked for, then
nothing of it; what was seen on the way is compared with what is granted, verb by verb.
"""

from __future__ import annotations

import pytest

from foveal_operator.kube.cluster import KubeCluster, load_configuration
from foveal_operator.kube.events import FLUSH_SECONDS, EventRecorder
from foveal_operator.kube.types import Obj
from foveal_operator.telemetry.series import Telemetry
from tests.support.api_server.api import Api
from tests.support.api_server.chart_role import role, token
from tests.support.api_server.nodes import READY, Fate
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.rights import Right, granted, used
from tests.support.api_server.sandbox import Sandbox
from tests.support.fake_clock import FakeTime
from tests.support.samples import LEGAL, put

SECONDS = 90.0
SILENT = Fate("Pending", ready=False, waiting="ContainerCreating")


def everything(sandbox: Sandbox) -> Obj:
    """Every kind of object that a resource may have, of a model that has to be fetched."""
    obj = put(LEGAL["scaled"], "metadata.namespace", sandbox.namespace)
    obj = put(obj, "spec.frontend.autoscaling", {"maxReplicas": 3, "metric": "CPU", "target": 70})
    obj = put(obj, "spec.observability.prometheusRule", "Enabled")
    obj["spec"]["caches"].pop("ipc")  # its claim would have to be there
    obj["spec"]["caches"]["encoder"].pop("warmSet")
    return obj


def little(sandbox: Sandbox) -> Obj:
    """A model on a claim of the user's, and nothing that can be left out."""
    off = {"podMonitor": "Disabled", "prometheusRule": "Disabled", "dashboard": "Disabled"}
    return sandbox.sample("cpu", security={"networkPolicy": "Disabled"}, observability=off)


def everything_is_there(sandbox: Sandbox) -> bool:
    found = {key.partition("/")[0] for key in sandbox.children()}
    return found >= {
        "HorizontalPodAutoscaler", "ScaledObject", "HTTPRoute", "InferencePool", "PodMonitor",
        "PrometheusRule", "PersistentVolumeClaim", "Job", "Secret", "ResourceClaimTemplate",
        "PodDisruptionBudget", "NetworkPolicy", "StatefulSet", "Deployment",
    }  # fmt: skip


def only_little_is_there(sandbox: Sandbox) -> bool:
    found = {key.partition("/")[0] for key in sandbox.children()}
    return found == {
        "ConfigMap", "Secret", "Service", "ServiceAccount", "PersistentVolumeClaim",
        "Deployment", "StatefulSet",
    }  # fmt: skip


async def _same_event_twice(url_config: str, resource: Obj) -> None:
    """The operator's own recorder, over a minute that takes no time."""
    time = FakeTime()
    cluster = KubeCluster(await load_configuration(url_config), Telemetry())
    try:
        recorder = EventRecorder(cluster, time.clock, "a")
        for _ in range(2):
            await recorder.record(resource, "Warning", "Twice", "It happened.")
            time.now += FLUSH_SECONDS
    finally:
        await cluster.close()


@pytest.fixture
def operator(sandbox: Sandbox) -> OperatorProcess:
    config = sandbox.cluster.kubeconfig(
        f"{sandbox.namespace}-role", token(sandbox), url=sandbox.proxy.url("a")
    )
    made = OperatorProcess("a", config, sandbox.namespace)
    sandbox.operators.append(made)
    made.start()
    return made


def difference(allowed: set[Right], seen: set[Right]) -> str:
    """ "" when the two are equal."""
    lines = [f"granted and never used: {right}" for right in sorted(allowed - seen)]
    lines += [f"used and not granted: {right}" for right in sorted(seen - allowed)]
    return "\n".join(lines)


@pytest.mark.timeout(400, func_only=True)
async def test_every_verb_of_the_roles_is_used_and_no_other(
    sandbox: Sandbox, operator: OperatorProcess
) -> None:
    # Frontends that wait without a word, as for a volume: their Events are read.
    sandbox.nodes.fate(SILENT, component="frontend")
    sandbox.apply(everything(sandbox))
    _wait(sandbox, "everything is there", lambda: everything_is_there(sandbox))
    sandbox.nodes.wait_for("engine", 1)
    events_read = ("events.k8s.io", "events", "list")
    _wait(sandbox, "Events of silent pods are read", lambda: events_read in used(sandbox.proxy))
    sandbox.nodes.fate(READY, component="frontend")
    await _same_event_twice(str(operator.kubeconfig), sandbox.resource() or {})
    # A port that somebody adds can only be replaced away.
    foreign = {"spec": {"ports": [{"name": "http", "port": 1, "targetPort": 1}]}}
    sandbox.api.merge("Service", sandbox.namespace, "qwen", foreign, manager="somebody").must()
    sandbox.apply(little(sandbox))
    _wait(sandbox, "little is there", lambda: only_little_is_there(sandbox))
    _wait(sandbox, "each verb was used", lambda: granted() <= used(sandbox.proxy))
    assert difference(granted(), used(sandbox.proxy)) == ""
    refused = [f"{call} {status}" for call, status in sandbox.proxy.writes if status == 403]
    assert not refused
    for right in sorted(granted()):
        lacking = difference(granted() - {right}, used(sandbox.proxy))
        assert lacking == f"used and not granted: {right}"
        superfluous = difference(granted(), used(sandbox.proxy) - {right})
        assert superfluous == f"granted and never used: {right}"


def _wait(sandbox: Sandbox, what: str, question: object) -> None:
    assert callable(question)
    try:
        wait_until(what, question, SECONDS)
    except TimeoutError as error:
        lacking = difference(granted(), used(sandbox.proxy))
        there = "\n".join(sorted(sandbox.children()))
        raise TimeoutError(f"{error}\n{lacking}\n{there}\n{sandbox.told()}") from None


def test_owners_that_block_a_deletion_need_the_right_to_finalizers(sandbox: Sandbox) -> None:
    """No call of the operator's is one to finalizers: the API server asks for the right itself."""
    stored = sandbox.api.create(sandbox.sample("cpu")).must()
    owner = {key: stored[key] for key in ("apiVersion", "kind")}
    owner |= {"name": "qwen", "uid": stored["metadata"]["uid"], "blockOwnerDeletion": True}
    metadata = {"name": "child", "namespace": sandbox.namespace, "ownerReferences": [owner]}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    with Api(sandbox.cluster, token(sandbox)) as account:
        wait_until("the roles are known", lambda: account.apply(body, "foveal-operator").ok, 20)
        sandbox.api.delete("ConfigMap", sandbox.namespace, "child").must()
        whole, _ = role("foveal", sandbox.namespace, "resources")
        rules = [rule for rule in whole["rules"] if "/finalizers" not in rule["resources"][0]]
        assert len(rules) == len(whole["rules"]) - 1
        change = {"rules": rules}
        sandbox.api.merge("Role", sandbox.namespace, "foveal", change).must()

        def refused() -> bool:
            reply = account.apply(body, "foveal-operator")
            sandbox.api.delete("ConfigMap", sandbox.namespace, "child")
            return reply.status == 403 and "blockOwnerDeletion" in reply.message

        wait_until("it is refused", refused, 20)
