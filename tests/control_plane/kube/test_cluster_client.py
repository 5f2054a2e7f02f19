"""The HTTP side: what each request carries, and what each answer means. Against a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from foveal_operator.api import reasons
from foveal_operator.api.reasons import Reason
from foveal_operator.kube.cluster import KubeCluster
from foveal_operator.kube.errors import (
    ApiError,
    Conflict,
    Denied,
    Forbidden,
    NotFound,
    NotLeader,
    Transient,
    UserError,
    classify,
    denial,
)
from foveal_operator.kube.kinds import CONFIG_MAP, INFERENCE, LEASE, POD
from foveal_operator.telemetry.series import Telemetry
from tests.support.fake_clock import FakeTime

Handler = Callable[[web.Request, bytes], web.Response]
BODY = {
    "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "n"},
}  # fmt: skip


class Server:
    """Plays back answers and keeps requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], dict[str, str], Any]] = []
        self.answers: list[tuple[int, Any, dict[str, str]]] = []
        self.most_at_once = self._now = 0
        self.gate: asyncio.Event | None = None
        self.is_full = asyncio.Event()

    async def handle(self, request: web.Request) -> web.Response:
        data = await request.read()
        parsed = json.loads(data) if data else None
        headers = dict(request.headers)
        self.requests.append((request.method, request.path, dict(request.query), headers, parsed))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        if self._now == 16:
            self.is_full.set()
        if self.gate is not None and "/leases" not in request.path:
            await self.gate.wait()
        self._now -= 1
        status, body, extra = self.answers.pop(0) if self.answers else (200, {}, {})
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=extra)
        return web.json_response(body, status=status, headers=extra)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def connect(server: Server) -> AsyncIterator[Callable[..., KubeCluster]]:
    from kubernetes.aio import client

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    clusters: list[KubeCluster] = []

    def make(**more: Any) -> KubeCluster:
        configuration = client.Configuration()
        configuration.host = f"http://127.0.0.1:{port}"
        time = FakeTime()

        async def no_wait(seconds: float) -> None:
            server.requests.append(("SLEEP", f"{seconds:.2f}", {}, {}, None))

        clock = replace(time.clock, sleep=no_wait)
        found = KubeCluster(configuration, more.pop("telemetry", Telemetry()), clock=clock, **more)
        clusters.append(found)
        return found

    yield make
    for cluster in clusters:
        await cluster.close()
    await runner.cleanup()


async def test_every_write_is_signed_strict_and_forced(server: Server, connect: Any) -> None:
    cluster = connect()
    await cluster.apply(BODY)
    await cluster.apply_status({**BODY, "kind": "MultiModalInference",
                                "apiVersion": "foveal.dev/v1alpha1"})  # fmt: skip
    await cluster.create(BODY)
    await cluster.update(BODY)
    for method, _, query, _, _ in server.requests:
        assert query["fieldManager"] == "foveal-operator"
        assert query["fieldValidation"] == "Strict"
        assert query.get("force") == ("true" if method == "PATCH" else None)
    (apply, status, create, update) = server.requests
    assert apply[1] == "/api/v1/namespaces/n/configmaps/a"
    assert apply[3]["Content-Type"] == "application/apply-patch+yaml"
    assert apply[4] == BODY
    assert status[1] == "/apis/foveal.dev/v1alpha1/namespaces/n/multimodalinferences/a/status"
    assert (create[0], create[1]) == ("POST", "/api/v1/namespaces/n/configmaps")
    assert update[0] == "PUT"


@pytest.mark.parametrize(
    ("exempt", "is_direct"),
    [
        ("127.0.0.0/8", True),
        ("example.com, 127.0.0.0/8,.svc", True),
        ("127.0.0.1", True),
        ("10.0.0.0/8,::/0,127.0.0.x/8,", False),
    ],
)
async def test_networks_in_no_proxy_are_reached_directly(
    server: Server, connect: Any, monkeypatch: pytest.MonkeyPatch, exempt: str, is_direct: bool
) -> None:
    """Clusters name their Services' network there, and inject it into every pod."""
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("NO_PROXY", exempt)
    cluster = connect()
    if is_direct:
        await cluster.apply(BODY)
        assert len(server.requests) == 1
    else:
        with pytest.raises(Transient):
            await cluster.apply(BODY)


async def test_a_delete_names_the_very_object(server: Server, connect: Any) -> None:
    cluster = connect()
    assert await cluster.delete(POD, "n", "a", "uid-1")
    assert server.requests[0][4]["preconditions"] == {"uid": "uid-1"}
    server.answers = [(409, {"message": "uid"}, {}), (404, {}, {})]
    assert not await cluster.delete(POD, "n", "a", "uid-1")
    assert not await cluster.delete(POD, "n", "a", "uid-1")


async def test_lists_are_live_paged_and_complete(server: Server, connect: Any) -> None:
    cluster = connect()
    one, two = {"metadata": {"name": "1"}}, {"metadata": {"name": "2"}}
    server.answers = [
        (200, {"items": [one], "metadata": {"continue": "more"}}, {}),
        (200, {"items": [two], "metadata": {}}, {}),
    ]
    found = await cluster.list_all(POD, None, "a=b")
    assert [body["metadata"]["name"] for body in found] == ["1", "2"]
    assert {body["kind"] for body in found} == {"Pod"}
    for _, path, query, _, _ in server.requests:
        assert path == "/api/v1/pods"
        assert query["labelSelector"] == "a=b"
        assert "resourceVersion" not in query, "a quorum read"
    assert server.requests[1][2]["continue"] == "more"


async def test_busy_answers_are_repeated_as_asked(server: Server, connect: Any) -> None:
    telemetry = Telemetry()
    cluster = connect(telemetry=telemetry)
    server.answers = [(429, {}, {"Retry-After": "2"}), (200, {"ok": 1}, {})]
    assert await cluster.apply(BODY) == {"ok": 1}
    waits = [float(path) for method, path, *_ in server.requests if method == "SLEEP"]
    assert len(waits) == 1
    assert 2.0 <= waits[0] <= 2.5
    count = telemetry.value
    assert count("rest_client_requests_total", verb="APPLY", code="429") == 1
    assert count("rest_client_requests_total", verb="APPLY", code="200") == 1


async def test_a_long_wait_is_left_to_the_queue(server: Server, connect: Any) -> None:
    server.answers = [(429, {}, {"Retry-After": "30"})]
    with pytest.raises(Transient) as caught:
        await connect().apply(BODY)
    assert caught.value.retry_after_seconds == 30
    assert len(server.requests) == 1


async def test_a_server_error_is_left_to_the_queue(server: Server, connect: Any) -> None:
    """A resource that fails for good must cost one request a pass, not several."""
    server.answers = [(500, {}, {})] * 5
    with pytest.raises(Transient):
        await connect().apply(BODY)
    assert len(server.requests) == 1


async def test_a_moment_asked_for_twice_is_left_to_the_queue(server: Server, connect: Any) -> None:
    server.answers = [(429, {}, {"Retry-After": "1"})] * 5
    with pytest.raises(Transient):
        await connect().get(POD, "n", "a")
    assert [method for method, *_ in server.requests] == ["GET", "SLEEP", "GET"]


async def test_an_existing_object_is_no_error_for_create(server: Server, connect: Any) -> None:
    server.answers = [(409, {"reason": "AlreadyExists"}, {})]
    assert await connect().create(BODY) is None


@pytest.mark.parametrize("call", ["create", "apply_new"])
async def test_a_quota_that_many_write_to_is_no_existing_object(
    server: Server, connect: Any, call: str
) -> None:
    """The API server says 409, too, when it cannot count an object: a key Secret that was not made
    was taken for made."""
    text = 'Operation cannot be fulfilled on resourcequotas "q": the object has been modified'
    details = {"name": "q", "kind": "resourcequotas"}
    server.answers = [(409, {"reason": "Conflict", "message": text, "details": details}, {})]
    with pytest.raises(Transient, match="resourcequotas"):
        await getattr(connect(), call)(BODY)


async def test_a_missing_object_is_none(server: Server, connect: Any) -> None:
    server.answers = [(404, {}, {})]
    assert await connect().get(CONFIG_MAP, "n", "a") is None


async def test_a_name_cannot_leave_its_place_in_the_path(server: Server, connect: Any) -> None:
    await connect().get(POD, "n", "a?x=1#b/c")
    assert [one[1:3] for one in server.requests] == [("/api/v1/namespaces/n/pods/a?x=1#b/c", {})]


async def test_discovery_asks_for_the_resource_not_only_the_group(
    server: Server, connect: Any
) -> None:
    cluster = connect()
    server.answers = [(200, {"resources": [{"name": "other"}]}, {}), (404, {}, {}),
                      (200, {"resources": [{"name": "multimodalinferences"}]}, {})]  # fmt: skip
    assert [await cluster.serves(INFERENCE) for _ in range(3)] == [False, False, True]


async def test_without_the_lease_nothing_but_the_lease_is_written(
    server: Server, connect: Any
) -> None:
    cluster = connect(may_write=lambda: False)
    for call in (cluster.apply(BODY), cluster.create(BODY), cluster.delete(POD, "n", "a", "u")):
        with pytest.raises(NotLeader):
            await call
    assert server.requests == []
    lease = {"apiVersion": LEASE.api_version, "kind": "Lease", "metadata": BODY["metadata"]}
    await cluster.update(lease)
    assert len(server.requests) == 1


async def test_a_lease_lost_between_two_tries_ends_the_tries(server: Server, connect: Any) -> None:
    may = iter([True, False])
    cluster = connect(may_write=lambda: next(may))
    server.answers = [(429, {}, {"Retry-After": "1"})]
    with pytest.raises(NotLeader):
        await cluster.apply(BODY)


async def test_no_more_than_sixteen_requests_at_once(server: Server, connect: Any) -> None:
    cluster = connect()
    server.gate = asyncio.Event()
    calls = [asyncio.ensure_future(cluster.get(POD, "n", str(i))) for i in range(40)]
    await server.is_full.wait()
    for _ in range(50):
        await asyncio.sleep(0)
    assert server.most_at_once == 16
    server.gate.set()
    await asyncio.gather(*calls)
    assert server.most_at_once == 16


async def test_the_lease_does_not_wait_for_slow_requests(server: Server, connect: Any) -> None:
    """All sixteen places are taken by requests without an answer; the Lease is renewed still."""
    cluster = connect()
    server.gate = asyncio.Event()
    calls = [asyncio.ensure_future(cluster.get(POD, "n", str(i))) for i in range(17)]
    await server.is_full.wait()
    body = {**BODY, "apiVersion": LEASE.api_version, "kind": LEASE.name}
    async with asyncio.timeout(10):  # without an end the test would hang
        assert await cluster.get(LEASE, "n", "a") == {}
        assert await cluster.update(body) == {}
    assert not any(call.done() for call in calls)
    server.gate.set()
    await asyncio.gather(*calls)


async def test_nobody_there_is_transient(connect: Any) -> None:
    from kubernetes.aio import client

    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:9"
    time = FakeTime()
    cluster = KubeCluster(configuration, Telemetry(), clock=time.clock)
    task = asyncio.ensure_future(cluster.get(POD, "n", "a"))
    for _ in range(1000):
        await time.pass_(1)
        done, _ = await asyncio.wait({task}, timeout=0.01)
        if done:
            break
    with pytest.raises(Transient):
        await task
    await cluster.close()


async def test_an_answer_that_is_no_json_is_told_as_it_is(server: Server, connect: Any) -> None:
    server.answers = [(400, "upstream says no", {})]
    with pytest.raises(UserError, match="upstream says no"):
        await connect().apply(BODY)


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (409, "the object has been modified", Conflict),
        (404, "not found", NotFound),
        (410, "The provided continue parameter is too old", Transient),
        (403, "cannot patch resource", Forbidden),
        (403, 'pods "x" is forbidden: exceeded quota: small', Denied),
        (403, 'pods "x" is forbidden: violates PodSecurity "restricted:latest"', Denied),
        (401, "Unauthorized", Forbidden),
        (422, "spec.x: Invalid value", UserError),
        (400, "strict decoding error", UserError),
        (500, "failed to create typed patch object (x): field not declared in schema", UserError),
        (500, 'duplicate entries for key [name="A"]', UserError),
        (500, "etcdserver: leader changed", Transient),
        (429, "too many requests", Transient),
        (503, "apiserver not ready", Transient),
        (504, "timeout", Transient),
    ],
)
def test_each_answer_has_one_meaning(status: int, message: str, kind: type[ApiError]) -> None:
    found = classify(status, {"message": message})
    assert type(found) is kind
    assert message in str(found)


HOOK = 'admission webhook "a.example" denied the request: '


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ('services is forbidden: User "u" cannot list resource "services"', reasons.MISSING_RIGHT),
        ('deployments.apps "x" is forbidden: cannot set blockOwnerDeletion if an ownerReference '
         "refers to a resource you can't set finalizers on", reasons.MISSING_RIGHT),
        (f'{HOOK}pods "x" is forbidden: User "u" cannot do it', reasons.ADMISSION_DENIED),
        (f"{HOOK}exceeded quota", reasons.ADMISSION_DENIED),
        ("pods \"x\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: "
         "no", reasons.ADMISSION_DENIED),
        ('Error creating: pods "x" is forbidden: failed quota: q: must specify limits.cpu',
         reasons.QUOTA_EXCEEDED),
        ('pods "x" is forbidden: [maximum cpu usage per Container is 1, but limit is 2, maximum '
         "memory usage per Container is 1Gi, but limit is 2Gi]", reasons.QUOTA_EXCEEDED),
        ('create Pod a-0 in StatefulSet a failed error: pods "a-0" is forbidden: violates '
         'PodSecurity "baseline:latest": hostPath volumes', reasons.POD_SECURITY),
        ('pods "x" is forbidden: unable to validate against any security context constraint: '
         "[provider restricted-v2: .spec.securityContext.fsGroup: Invalid value: [10001]: 10001 is "
         'not an allowed group, provider "anyuid": Forbidden: not usable by user or '
         "serviceaccount]", reasons.POD_SECURITY),
        ('pods "x" is forbidden: error looking up service account a/b: serviceaccount "b" not '
         "found", reasons.SERVICE_ACCOUNT_MISSING),
        ('pods "x" is forbidden: something new', reasons.FAILED_CREATE),
    ],
)  # fmt: skip
def test_who_refuses_is_told_apart(message: str, reason: Reason) -> None:
    """All of these came as 403; most counted as a right that the operator lacks."""
    assert denial(message) is reason
    found = classify(403, {"kind": "Status", "reason": "Forbidden", "message": message})
    assert isinstance(found, Forbidden) is (reason is reasons.MISSING_RIGHT)
    if isinstance(found, Denied):
        assert found.reason is reason


@pytest.mark.parametrize("given", ["soon", "-5", "1e99", ""])
def test_a_strange_retry_after_is_bounded(given: str) -> None:
    found = classify(429, {}, given)
    assert isinstance(found, Transient)
    assert 0 <= found.retry_after_seconds <= 300
