"""Each fault of the proxy does what it says, on a real API server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.api_server import faults
from tests.support.api_server.api import Api
from tests.support.api_server.fault_proxy import FaultProxy
from tests.support.api_server.programs import ADMIN, Cluster, wait_until

MANAGER = "foveal-operator"


@pytest.fixture
def proxy(cluster: Cluster) -> Iterator[FaultProxy]:
    with FaultProxy(cluster) as running:
        yield running


@pytest.fixture
def client(cluster: Cluster, proxy: FaultProxy) -> Iterator[Api]:
    with Api(cluster, url=proxy.url("a")) as through:
        yield through


def config(namespace: str, value: str = "v", name: str = "c") -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"k": value}}


def test_without_faults_it_only_counts(client: Api, proxy: FaultProxy, namespace: str) -> None:
    client.apply(config(namespace), MANAGER).must()
    assert client.get("ConfigMap", namespace, "c")
    refused = client.create(config(namespace), MANAGER=MANAGER)
    assert refused.status == 409
    assert [(str(call), status) for call, status in proxy.writes] == [
        (f"a: apply configmaps/{namespace}/c", 201),
        (f"a: create configmaps/{namespace}", 409),
    ]
    assert "field manager 'test'" in proxy.audit.violations[0]


def test_discovery_without_headers_passes(proxy: FaultProxy) -> None:
    """The proxy once added a content type of its own; kopf's first question was then refused."""
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert httpx.get(f"{proxy.url('k')}/api", headers=headers, trust_env=False).status_code == 200


def test_clients_are_told_apart(
    client: Api, cluster: Cluster, proxy: FaultProxy, namespace: str
) -> None:
    with Api(cluster, url=proxy.url("b")) as other:
        client.apply(config(namespace), MANAGER).must()
        other.apply(config(namespace, "w"), MANAGER).must()
    assert [call.client for call in proxy.writes_of("configmaps")] == ["a", "b"]


@pytest.mark.parametrize("status", [409, 429, 500, 503])
def test_a_refused_write_never_arrives(
    client: Api, api: Api, proxy: FaultProxy, namespace: str, status: int
) -> None:
    proxy.faults.append(faults.refuse(faults.write_number(1), status))
    assert client.apply(config(namespace), MANAGER).status == status
    assert api.get("ConfigMap", namespace, "c") is None
    assert proxy.num_writes == 0
    assert client.apply(config(namespace), MANAGER).ok


def test_a_lost_answer_leaves_the_write_done(
    client: Api, api: Api, proxy: FaultProxy, namespace: str
) -> None:
    proxy.faults.append(faults.lose_answer(faults.any_write))
    assert client.apply(config(namespace), MANAGER).status == 504
    assert api.get("ConfigMap", namespace, "c")
    assert client.apply(config(namespace), MANAGER).ok
    assert proxy.audit.violations == []


def test_a_black_hole_answers_nothing(client: Api, proxy: FaultProxy, namespace: str) -> None:
    path = client.path("ConfigMap", namespace, "c")
    proxy.faults.append(faults.black_hole(lambda call: call.target.name == "c"))
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(proxy.url("c") + path, timeout=0.3, trust_env=False)


def test_a_delayed_call_arrives(client: Api, proxy: FaultProxy, namespace: str) -> None:
    proxy.faults.append(faults.delay(faults.any_write, 0.2))
    assert client.apply(config(namespace), MANAGER).ok


@pytest.mark.parametrize("after_commit", [False, True])
def test_a_process_is_killed_at_its_nth_write(
    client: Api, api: Api, proxy: FaultProxy, namespace: str, after_commit: bool
) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    second = faults.write_number(2)
    proxy.faults.append(faults.kill(second, lambda: victim.pid, after_commit=after_commit))
    client.apply(config(namespace), MANAGER).must()
    assert victim.poll() is None
    client.apply(config(namespace, name="d"), MANAGER)
    assert victim.wait(60) == -9
    assert (api.get("ConfigMap", namespace, "d") is not None) is after_commit


def test_stale_reads_come_from_the_past(
    client: Api, api: Api, proxy: FaultProxy, namespace: str
) -> None:
    path = api.path("ConfigMap", namespace)
    past = api.request("GET", path).must()
    api.apply(config(namespace)).must()
    proxy.faults.append(
        faults.stale_reads(
            lambda call: call.target.resource == "configmaps",
            lambda call: past if call.verb == "list" else None,
        )
    )
    assert client.list("ConfigMap", namespace) == past["items"]
    assert client.get("ConfigMap", namespace, "c")
    proxy.clear()
    assert "c" in [obj["metadata"]["name"] for obj in client.list("ConfigMap", namespace)]


# --- watches -------------------------------------------------------------------------------------
class Watcher:
    """Reads a watch on a thread."""

    def __init__(self, url: str) -> None:
        self.seen: list[tuple[str, str]] = []
        self.ended = False
        self._url = url
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        headers = {"Authorization": f"Bearer {ADMIN}"}
        with (
            contextlib.suppress(httpx.HTTPError),  # the proxy goes before the watch does
            httpx.stream("GET", self._url, headers=headers, timeout=20, trust_env=False) as reply,
        ):
            for line in reply.iter_lines():
                event = json.loads(line)
                if event["type"] == "DELETED":
                    break
                shown = event["object"].get("data", {}).get("k", event["object"].get("code"))
                self.seen.append((event["type"], shown))
        self.ended = True

    def close(self, api: Api, namespace: str) -> None:
        """The last event there is: its config map goes."""
        api.delete("ConfigMap", namespace, "c")
        self._thread.join(20)


@pytest.fixture
def watch(client: Api, api: Api, proxy: FaultProxy, namespace: str) -> Iterator[Watcher]:
    """Of the one config map that the tests change."""
    version = api.request("GET", api.path("ConfigMap", namespace)).must()["metadata"]
    path = client.path("ConfigMap", namespace)
    query = f"watch=true&resourceVersion={version['resourceVersion']}&timeoutSeconds=30"
    watcher = Watcher(f"{proxy.url('w')}{path}?{query}&fieldSelector=metadata.name%3Dc")
    yield watcher
    watcher.close(api, namespace)


def change(api: Api, namespace: str, *values: str) -> None:
    for value in values:
        api.apply(config(namespace, value)).must()


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, [("ADDED", "1"), ("MODIFIED", "2"), ("MODIFIED", "3")]),
        (faults.drop_events, [("ADDED", "1"), ("MODIFIED", "3")]),
        (
            faults.duplicate_events,
            [("ADDED", "1"), ("MODIFIED", "2"), ("MODIFIED", "2"), ("MODIFIED", "3")],
        ),
        (faults.expire_watch, [("ADDED", "1"), ("ERROR", 410), ("MODIFIED", "3")]),
        (faults.cut_watch, [("ADDED", "1")]),
    ],
    ids=["none", "drop", "duplicate", "expire", "cut"],
)
def test_watch_events_are_tampered_with(
    watch: Watcher, api: Api, proxy: FaultProxy, namespace: str, fault: Any, expected: Any
) -> None:
    if fault:
        proxy.event_faults.append(fault(faults.of_resource("configmaps", "MODIFIED")))
    change(api, namespace, "1", "2", "3")
    wait_until("the events arrive", lambda: len(watch.seen) >= len(expected))
    if fault is faults.cut_watch:
        wait_until("the watch ends", lambda: watch.ended)
    assert watch.seen == expected


def test_a_watch_can_be_refused(client: Api, proxy: FaultProxy, namespace: str) -> None:
    proxy.faults.append(faults.refuse(lambda call: call.verb == "watch", 503))
    path = client.path("ConfigMap", namespace)
    assert client.request("GET", path, watch="true").status == 503
