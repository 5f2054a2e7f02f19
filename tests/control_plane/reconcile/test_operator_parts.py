"""Events, facts, flags, probes and log lines."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from foveal_operator.api.workloads import Accelerator, Engine
from foveal_operator.common.errors import UsageError
from foveal_operator.common.logs import JsonLines
from foveal_operator.kube.errors import Forbidden, Transient
from foveal_operator.kube.events import EventRecorder
from foveal_operator.kube.types import Obj
from foveal_operator.manifests.budget_inputs import NodeFacts, budget_inputs
from foveal_operator.manifests.context import Context
from foveal_operator.manifests.documents import document_json, engine_document
from foveal_operator.pods.probes import PodReports
from foveal_operator.pods.reports import Reports
from foveal_operator.process.options import read
from foveal_operator.process.server import ProbeServer
from foveal_operator.reconcile.baseline import Basis, read_basis
from foveal_operator.reconcile.inventory import (
    Inventory,
    count_free_devices,
    smallest_device_bytes,
)
from foveal_operator.status.conditions import (
    previous_conditions,
    scaling_state,
    steady,
)
from foveal_operator.telemetry.declared import OPERATOR_METRICS
from foveal_operator.telemetry.series import Telemetry
from foveal_operator.testing.fake_cluster import FakeCluster
from foveal_runtime.plan.budget.planner import plan as make_plan
from tests.support.budget_samples import VLM
from tests.support.fake_clock import FakeTime
from tests.support.operator_rig import OPTIONAL_KINDS, resource
from tests.support.regenerate import FACTS
from tests.support.stored_objects import FETCHED


# --- Events ------------------------------------------------------------------------------------
@pytest.fixture
def time() -> FakeTime:
    return FakeTime()


def regarding() -> Obj:
    body = resource()
    body["metadata"]["uid"] = "uid-x"
    return body


def events(cluster: FakeCluster) -> list[Obj]:
    return [body for (kind, _, _), body in cluster.objects.items() if kind == "Event"]


async def test_what_repeats_is_one_event_with_a_count(time: FakeTime) -> None:
    cluster = FakeCluster()
    recorder = EventRecorder(cluster, time.clock, "me")
    for _ in range(100):
        await recorder.record(regarding(), "Warning", "OOMKilled", "again")
        time.now += 5
    (event,) = events(cluster)
    assert event["reason"] == "OOMKilled"
    assert event["regarding"]["uid"] == "uid-x"
    assert 80 <= event["series"]["count"] <= 100
    writes = [w for w in cluster.writes if w[1] == "Event"]
    assert len(writes) <= 1 + 500 / 60, "the count is written once a minute"


async def test_after_ten_minutes_there_may_be_another(time: FakeTime) -> None:
    cluster = FakeCluster()
    recorder = EventRecorder(cluster, time.clock, "me")
    for _ in range(3):
        await recorder.record(regarding(), "Warning", "OOMKilled", "again")
        time.now += 601
    assert len(events(cluster)) == 3


async def test_a_restart_writes_no_second_event(time: FakeTime) -> None:
    cluster = FakeCluster()
    for _ in range(2):
        await EventRecorder(cluster, time.clock, "me").record(regarding(), "Normal", "Ready", "yes")
        time.now += 30
    assert len(events(cluster)) == 1


async def test_a_long_note_fits_in_the_bytes_that_the_api_server_takes(time: FakeTime) -> None:
    """It counts bytes: a long answer of a webhook in Chinese was no Event at all."""
    cluster = FakeCluster()
    note = "x" + "不允许" * 400
    await EventRecorder(cluster, time.clock, "me").record(regarding(), "Warning", "Refused", note)
    (event,) = events(cluster)
    assert 990 < len(event["note"].encode()) <= 1024
    assert note.startswith(event["note"])


async def test_an_event_that_fails_is_nobodys_problem(time: FakeTime) -> None:
    cluster = FakeCluster()
    cluster.fail(Transient("busy"), kind="Event")
    await EventRecorder(cluster, time.clock, "me").record(regarding(), "Normal", "Ready", "yes")
    assert events(cluster) == []


# --- facts -------------------------------------------------------------------------------------
def node(name: str, memory: str = "64Gi", gpus: int = 0, gpu_mib: int = 0, **spec: Any) -> Obj:
    labels = {"nvidia.com/gpu.memory": str(gpu_mib)} if gpu_mib else {}
    allocatable = {"memory": memory, **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
        "spec": spec, "status": {"allocatable": allocatable},
    }  # fmt: skip


def gpu_pod(name: str, count: int, on: str | None = None, phase: str = "Running") -> Obj:
    limits = {"limits": {"nvidia.com/gpu": str(count)}}
    spec: Obj = {"containers": [{"name": "c", "resources": limits}]}
    if on:
        spec["nodeName"] = on
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "n"},
        "spec": spec, "status": {"phase": phase},
    }  # fmt: skip


async def test_facts_come_from_the_nodes_that_could_run_an_engine(time: FakeTime) -> None:
    cluster = FakeCluster(missing=OPTIONAL_KINDS - {"PodMonitor"})
    cluster.add(node("cpu", "512Gi"))
    cluster.add(node("a", "128Gi", 8, 81559))
    cluster.add(node("b", "256Gi", 4, 46068))
    inventory = Inventory(cluster, time.clock)
    assert await inventory.refresh()
    assert not await inventory.refresh(), "no change of APIs"
    assert inventory.apis == {"PodMonitor"}
    gpu = inventory.node_facts(Engine())
    assert gpu == NodeFacts(node_bytes=256 << 30, device_bytes=46068 << 20)
    assert inventory.node_facts(Engine(accelerator=Accelerator(type="CPU"))).node_bytes == 512 << 30


def labelled(labels: dict[str, str], resource: str = "nvidia.com/gpu") -> Obj:
    status = {"allocatable": {"memory": "64Gi", resource: "8"}}
    return {"metadata": {"name": "n", "labels": labels}, "status": status}


SHARED = {"nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.sharing-strategy": "time-slicing"}


@pytest.mark.parametrize(
    ("labels", "resource", "gib"),
    [
        ({"amd.com/gpu.vram": "192G"}, "amd.com/gpu", 192),
        ({"nvidia.com/gpu.memory": "81920"}, "nvidia.com/gpu", 80),
        ({**SHARED, "nvidia.com/gpu.replicas": "4"}, "nvidia.com/gpu", 20),
        ({**SHARED, "nvidia.com/gpu.replicas": "1"}, "nvidia.com/gpu", 80),
        ({**SHARED, "nvidia.com/gpu.replicas": "0"}, "nvidia.com/gpu", 80),
        ({**SHARED, "nvidia.com/gpu.replicas": "4"}, "nvidia.com/gpu.shared", 20),
        ({"nvidia.com/gpu.memory": "much"}, "nvidia.com/gpu", 0),
        ({"amd.com/gpu.vram": "192G"}, "example.com/gpu", 0),
    ],
)  # fmt: skip
def test_memory_of_a_device_is_read_as_its_labeller_writes_it(
    labels: dict[str, str], resource: str, gib: int
) -> None:
    """AMD's 192G was read as a number of MiB, and of a device that several pods share each was
    given all."""
    assert smallest_device_bytes([labelled(labels, resource)], resource) == gib << 30


async def test_one_pod_may_be_given_more_than_its_share(time: FakeTime) -> None:
    """Time slicing divides no memory: accelerator.memory up to the whole device is not refused."""
    cluster = FakeCluster(missing=OPTIONAL_KINDS)
    shared = node("a", gpus=8)
    shared["metadata"]["labels"] = {**SHARED, "nvidia.com/gpu.replicas": "4"}
    cluster.add(shared)
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    found = inventory.node_facts(Engine())
    assert (found.device_bytes, found.largest_device_bytes) == (20 << 30, 80 << 30)


async def test_under_mps_no_pod_is_given_more_than_its_share(time: FakeTime) -> None:
    """MPS limits what each may take: an engine planned for more failed while it started."""
    cluster = FakeCluster(missing=OPTIONAL_KINDS)
    shared = node("a", gpus=8)
    shared["metadata"]["labels"] = {
        **SHARED, "nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "mps",
    }  # fmt: skip
    cluster.add(shared)
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    found = inventory.node_facts(Engine())
    assert (found.device_bytes, found.largest_device_bytes) == (20 << 30, 0)


async def test_without_the_right_to_see_nodes_nothing_is_known(time: FakeTime) -> None:
    cluster = FakeCluster(missing=OPTIONAL_KINDS)
    cluster.fail(Forbidden("may not list nodes", 403), kind="Node")
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    assert inventory.node_facts(Engine()) == NodeFacts()
    cluster.fail(Forbidden("may not list nodes", 403), kind="Node")
    assert await inventory.free_devices(Engine(), 9) is None


def test_free_devices_are_those_nobody_has_asked_for() -> None:
    nodes = [node("a", gpus=8), node("b", gpus=8, unschedulable=True)]
    pods = [
        gpu_pod("1", 2, "a"), gpu_pod("2", 4, "b"), gpu_pod("3", 1), gpu_pod("4", 4, "a", "Failed"),
    ]  # fmt: skip
    assert count_free_devices(nodes, pods, "nvidia.com/gpu") == 5
    assert count_free_devices(nodes, [gpu_pod("x", 99, "a")], "nvidia.com/gpu") == 0


async def test_free_devices_are_counted_at_most_every_ten_seconds(time: FakeTime) -> None:
    cluster = FakeCluster()
    cluster.add(node("a", gpus=4))
    inventory = Inventory(cluster, time.clock)
    await inventory.refresh()
    calls = len(cluster.calls)
    assert [await inventory.free_devices(Engine(), 9) for _ in range(5)] == [4] * 5
    assert len(cluster.calls) - calls == 3, "waiting pods, the node, its pods"
    time.now += 11
    await inventory.free_devices(Engine(), 9)
    assert len(cluster.calls) - calls == 6


@pytest.mark.parametrize("data", [None, {}, {"basis.json": "{"}, {"basis.json": '{"x": 1}'}])
def test_a_spoilt_basis_is_none(data: Obj | None) -> None:
    assert read_basis({"data": data} if data is not None else None) is None


def test_a_basis_reads_back() -> None:
    text = '{"runtime_image": "i", "node_bytes": 5}'
    assert read_basis({"data": {"basis.json": text}}) == Basis(runtime_image="i", node_bytes=5)


def test_an_image_of_before_snapshots_is_sent_no_budget_for_them() -> None:
    """Engines of the image that a resource had before an upgrade refused the unknown field."""
    text = '{"runtime_image": "old", "device_bytes": 85899345920}'
    basis = read_basis({"data": {"basis.json": text}})
    assert basis is not None
    hybrid = msgspec.structs.replace(VLM, state_bytes=50 << 20)
    sent = {}
    for image in ("old", "new"):
        kept = msgspec.structs.replace(basis, without_snapshots=basis.refusing_snapshots("old"))
        assert kept.nodes(image) == msgspec.structs.replace(
            NodeFacts(device_bytes=80 << 30), takes_snapshots=image == "new"
        )
        budget = make_plan(budget_inputs(FETCHED, kept.nodes(image)), hybrid)
        context = Context(inference=FETCHED, plan=budget, facts=FACTS)
        sent[image] = "snapshot_bytes" in document_json(engine_document(context))
    assert sent == {"old": False, "new": True}
    assert not basis.nodes("old").takes_snapshots
    assert Basis(runtime_image="new", without_snapshots="").nodes("new").takes_snapshots


# --- observations --------------------------------------------------------------------------------
def test_measurements_that_tremble_are_not_news() -> None:
    body = {"status": {"budgets": {"ipc": {"measuredBytes": 1000}, "kv": {}}}}
    measured = {"ipc": 1040, "kv": 7}
    assert steady(measured, body) == {"ipc": 1000, "kv": 7}
    assert steady({"ipc": 1100}, body) == {"ipc": 1100}
    assert steady({"ipc": 3}, {}) == {"ipc": 3}


def test_autoscalers_speak_for_themselves() -> None:
    def said(kind: str, status: str, **more: str) -> Obj:
        return {"status": {"conditions": [{"type": kind, "status": status, **more}]}}

    assert scaling_state({}) == ("", "")
    good, ready = said("ScalingActive", "True"), said("Ready", "True")
    assert scaling_state({"a": good, "b": ready})[0] == "True"
    assert scaling_state({"a": good, "b": None}) == ("Unknown", "b has not reported yet")
    bad = said("ScalingActive", "False", reason="FailedGetResourceMetric", message="no metrics")
    assert scaling_state({"a": None, "b": bad}) == ("False", "b: no metrics")
    assert scaling_state({"a": said("Ready", "False")}) == ("False", "a: is inert")
    assert scaling_state({"a": said("Active", "False")})[0] == "Unknown"  # scaled down, no more


def test_conditions_of_another_version_count_as_absent() -> None:
    good = {
        "type": "Ready", "status": "True", "reason": "Ready", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    stored = {"status": {"conditions": [good, {"type": "Odd"}]}}
    assert [c.type for c in previous_conditions(stored)] == ["Ready"]


# --- pods' reports in the background -----------------------------------------------------------
async def test_a_pass_never_waits_for_a_pod_and_news_bring_it_back() -> None:
    said, gate, keys = [PodReports(sessions_up=1, sessions_wanted=1)], asyncio.Event(), []

    async def ask(*_: Any) -> PodReports:
        await gate.wait()
        return said[0]

    reports = Reports(ask, keys.append)
    labels = {"app.kubernetes.io/instance": "tiny"}
    pods = ({"metadata": {"name": "p", "namespace": "default", "labels": labels}},)
    assert await reports.observe((), ()) == PodReports()
    for _ in range(3):
        assert await reports.observe(pods, ()) == PodReports(), "not known yet"
    gate.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert keys == [("default", "tiny")]
    assert await reports.observe(pods, ()) == said[0]
    for _ in range(5):
        await asyncio.sleep(0)
    assert keys == [("default", "tiny")], "no news, no key"
    await reports.stop()


# --- flags -------------------------------------------------------------------------------------
def test_flags_and_environment_agree() -> None:
    environment = {
        "FOVEAL_OPERATOR_NAMESPACES": "a, b,a",
        "FOVEAL_OPERATOR_WORKERS": "3",
        "FOVEAL_OPERATOR_RESYNC_SECONDS": "5",
        "POD_NAMESPACE": "system",
        "POD_NAME": "op-0",
    }
    found = read(["--workers", "4"], environment)
    assert found.namespaces == ("a", "b")
    assert found.num_workers == 4, "a flag wins"
    assert found.resync_seconds == 5.0
    assert found.lease is not None
    assert found.lease.namespace == "system"
    assert found.identity.startswith("op-0_")
    assert read(["--leader-elect", "false"], {}).lease is None


@pytest.mark.parametrize(
    "flags",
    [
        ["--bind", "8080"],
        ["--workers", "0"],
        ["--resync-seconds", "0"],
        ["--lease-seconds", "5"],
        ["--rules", "/nowhere.yaml"],
        ["--namespaces", ",".join(f"n{i}" for i in range(300))],
    ],
)
def test_wrong_flags_are_refused_by_name(flags: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read(flags, {})
    assert flags[0].lstrip("-").split("-")[0] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"), [("LEADER_ELECT", "True"), ("LOG_LEVEL", "debug"), ("LOG_FORMAT", "yaml")]
)
def test_the_environment_has_the_flags_choices(name: str, value: str) -> None:
    """LEADER_ELECT=True was no "true": replicas wrote side by side without a Lease."""
    flag = name.lower().replace("_", "-")
    with pytest.raises(UsageError, match=f"^--{flag} '{value}': write one of "):
        read([], {f"FOVEAL_OPERATOR_{name}": value})


def test_rules_and_dashboards_are_read(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("groups: [{name: foveal, rules: []}]")
    (tmp_path / "board.json").write_text('{"title": "Foveal"}')
    found = read(["--rules", str(tmp_path / "rules.yaml"), "--dashboards", str(tmp_path)], {})
    assert found.settings.rule_groups[0]["name"] == "foveal"
    assert list(found.settings.dashboards) == ["board.json"]


# --- probes, metrics, logs ---------------------------------------------------------------------
async def test_probes_say_what_is_wrong() -> None:
    telemetry = Telemetry()
    trouble = {"api": "the API server does not answer"}
    server = ProbeServer(
        telemetry,
        live={"workers": lambda: ""},
        ready={"api": lambda: trouble["api"]},
        before_scrape=lambda: telemetry.set("foveal_operator_watch_is_up", 1),
    )
    port = await server.start("127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        async with session.get("/livez") as answer:
            assert answer.status == 200
        async with session.get("/readyz") as answer:
            assert answer.status == 503
            assert "[-]api the API server does not answer" in await answer.text()
        trouble["api"] = ""
        async with session.get("/readyz") as answer:
            assert answer.status == 200
        async with session.get("/metrics") as answer:
            assert "foveal_operator_watch_is_up 1.0" in await answer.text()
    await server.stop()


@pytest.mark.parametrize("has_ipv6", [True, False])
async def test_the_default_address_answers_probes_of_either_family(
    has_ipv6: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster may have one family only; a kernel may lack the other."""
    if has_ipv6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_ipv6)
    server = ProbeServer(Telemetry(), live={}, ready={})
    port = await server.start(read([], {}).bind_host, 0)
    async with aiohttp.ClientSession() as session:
        for host in ("127.0.0.1", "[::1]")[: 2 if has_ipv6 else 1]:
            async with session.get(f"http://{host}:{port}/livez") as answer:
                assert answer.status == 200
    await server.stop()


def test_metric_names_are_unique_and_follow_controller_runtime() -> None:
    names = [metric.name for metric in OPERATOR_METRICS]
    assert len(names) == len(set(names))
    expected = {
        "controller_runtime_reconcile", "workqueue_depth", "rest_client_requests",
        "leader_election_master_status", "workqueue_queue_duration_seconds",
    }  # fmt: skip
    assert expected <= set(names)


def test_log_lines_are_json() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "x %s", ("é",), None)
    assert json.loads(JsonLines().format(record))["message"] == "x é"
