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
from tests.control_plane.api_server.test_role import role, token
from tests.support.api_server.api import Api
from tests.support.api_server.nodes import READY, Fate
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.rights import Right, granted, used
from tests.support.api_server.world import World
from tests.support.fake_clock import FakeTime
from tests.support.samples import LEGAL, put

SECONDS = 90.0
SILENT = Fate("Pending", ready=False, waiting="ContainerCreating")
_HTTP_ROUTE = {"parentRefs": [{"name": "gateway", "namespace": "infra"}]}


def everything(world: World) -> Obj:
    """Every kind of object that a resource may have, of a model that has to be fetched."""
    obj = put(LEGAL["scaled"], "metadata.namespace", world.namespace)
    obj = put(obj, "spec.frontend.autoscaling", {"maxReplicas": 3, "metric": "CPU", "target": 70})
    obj = put(obj, "spec.observability.prometheusRule", "Enabled")
    obj["spec"]["caches"].pop("ipc")  # its claim would have to be there
    obj["spec"]["caches"]["encoder"].pop("warmSet")
    return obj


def little(world: World) -> Obj:
    """A model on a claim of the user's, and nothing that can be left out."""
    off = {"podMonitor": "Disabled", "prometheusRule": "Disabled", "dashboard": "Disabled"}
    return world.sample("cpu", security={"networkPolicy": "Disabled"}, observability=off)


def everything_is_there(world: World) -> bool:
    found = {key.partition("/")[0] for key in world.children()}
    return found >= {
        "HorizontalPodAutoscaler", "ScaledObject", "HTTPRoute", "InferencePool", "PodMonitor",
        "PrometheusRule", "PersistentVolumeClaim", "Job", "Secret", "ResourceClaimTemplate",
        "PodDisruptionBudget", "NetworkPolicy", "StatefulSet", "Deployment",
    }  # fmt: skip


def only_little_is_there(world: World) -> bool:
    found = {key.partition("/")[0] for key in world.children()}
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
def operator(world: World) -> OperatorProcess:
    config = world.cluster.kubeconfig(
        f"{world.namespace}-role", token(world), url=world.proxy.url("a")
    )
    made = OperatorProcess("a", config, world.namespace)
    world.operators.append(made)
    made.start()
    return made


def difference(allowed: set[Right], seen: set[Right]) -> str:
    """ "" when the two are equal."""
    lines = [f"granted and never used: {right}" for right in sorted(allowed - seen)]
    lines += [f"used and not granted: {right}" for right in sorted(seen - allowed)]
    return "\n".join(lines)


@pytest.mark.timeout(400, func_only=True)
async def test_every_verb_of_the_roles_is_used_and_no_other(
    world: World, operator: OperatorProcess
) -> None:
    # Frontends that wait without a word, as for a volume: their Events are read.
    world.nodes.fate(SILENT, component="frontend")
    world.apply(everything(world))
    _wait(world, "everything is there", lambda: everything_is_there(world))
    world.nodes.wait_for("engine", 1)
    events_read = ("events.k8s.io", "events", "list")
    _wait(world, "Events of silent pods are read", lambda: events_read in used(world.proxy))
    world.nodes.fate(READY, component="frontend")
    await _same_event_twice(str(operator.kubeconfig), world.resource() or {})
    # A port that somebody adds can only be replaced away.
    foreign = {"spec": {"ports": [{"name": "http", "port": 1, "targetPort": 1}]}}
    world.api.merge("Service", world.namespace, "qwen", foreign, manager="somebody").must()
    world.apply(little(world))
    _wait(world, "little is there", lambda: only_little_is_there(world))
    _wait(world, "each verb was used", lambda: granted() <= used(world.proxy))
    assert difference(granted(), used(world.proxy)) == ""
    refused = [f"{call} {status}" for call, status in world.proxy.writes if status == 403]
    assert not refused
    for right in sorted(granted()):
        lacking = difference(granted() - {right}, used(world.proxy))
        assert lacking == f"used and not granted: {right}"
        superfluous = difference(granted(), used(world.proxy) - {right})
        assert superfluous == f"granted and never used: {right}"


def _wait(world: World, what: str, question: object) -> None:
    assert callable(question)
    try:
        wait_until(what, question, SECONDS)
    except TimeoutError as error:
        lacking = difference(granted(), used(world.proxy))
        there = "\n".join(sorted(world.children()))
        raise TimeoutError(f"{error}\n{lacking}\n{there}\n{world.told()}") from None


def test_owners_that_block_a_deletion_need_the_right_to_finalizers(world: World) -> None:
    """No call of the operator's is one to finalizers: the API server asks for the right itself."""
    stored = world.api.create(world.sample("cpu")).must()
    owner = {key: stored[key] for key in ("apiVersion", "kind")}
    owner |= {"name": "qwen", "uid": stored["metadata"]["uid"], "blockOwnerDeletion": True}
    metadata = {"name": "child", "namespace": world.namespace, "ownerReferences": [owner]}
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
    with Api(world.cluster, token(world)) as account:
        wait_until("the roles are known", lambda: account.apply(body, "foveal-operator").ok, 20)
        world.api.delete("ConfigMap", world.namespace, "child").must()
        whole, _ = role("foveal", world.namespace, "resources")
        rules = [rule for rule in whole["rules"] if "/finalizers" not in rule["resources"][0]]
        assert len(rules) == len(whole["rules"]) - 1
        change = {"rules": rules}
        world.api.merge("Role", world.namespace, "foveal", change).must()

        def refused() -> bool:
            reply = account.apply(body, "foveal-operator")
            world.api.delete("ConfigMap", world.namespace, "child")
            return reply.status == 403 and "blockOwnerDeletion" in reply.message

        wait_until("it is refused", refused, 20)
