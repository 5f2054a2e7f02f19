"""A small client of the API server for tests: raw objects in, raw objects out.

Used by every test of this folder as the user, the administrator or a foreign controller. Errors
are values (Reply.status), since most tests ask for the server's verdict.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx

from foveal_operator.kube.types import Obj
from tests.support.api_server.programs import ADMIN, Cluster, wait_until

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON = "application/json"
GROUP_VERSIONS = {
    "MultiModalInference": "foveal.dev/v1alpha1",
    **dict.fromkeys(("Deployment", "StatefulSet", "ReplicaSet", "ControllerRevision"), "apps/v1"),
    "Job": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    "Event": "events.k8s.io/v1",
    "NetworkPolicy": "networking.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
    **dict.fromkeys(
        ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"), "rbac.authorization.k8s.io/v1"
    ),
    "HorizontalPodAutoscaler": "autoscaling/v2",
    **dict.fromkeys(
        ("ResourceClaimTemplate", "ResourceClaim", "ResourceSlice", "DeviceClass"),
        "resource.k8s.io/v1",
    ),
    **dict.fromkeys(("PodMonitor", "PrometheusRule"), "monitoring.coreos.com/v1"),
    "ScaledObject": "keda.sh/v1alpha1",
    "HTTPRoute": "gateway.networking.k8s.io/v1",
    "InferencePool": "inference.networking.k8s.io/v1",
}


class Reply:
    """What the server said. `body` is {} when it was no JSON object."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.text = response.text
        self.warnings = response.headers.get_list("warning")
        try:
            self.body: Obj = response.json()
        except json.JSONDecodeError:
            self.body = {}

    @property
    def ok(self) -> bool:
        return self.status < 300

    @property
    def message(self) -> str:
        return str(self.body.get("message", self.text)) if not self.ok else ""

    def must(self) -> Obj:
        """The object; fails with the server's words when it refused."""
        assert self.ok, f"{self.status}: {self.message}"
        return self.body


class Api:
    """One identity at one address. Close it, or use it in a with statement."""

    def __init__(self, cluster: Cluster, token: str = ADMIN, url: str = "") -> None:
        base = url or cluster.url
        verify = ssl.create_default_context(cafile=str(cluster.ca_file))
        self._client = httpx.Client(
            base_url=base,
            headers={"Authorization": f"Bearer {token}"},
            verify=verify if base.startswith("https") else False,
            timeout=60.0,
            trust_env=False,
        )
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = JSON,
        accept: str = JSON,
        **query: Any,
    ) -> Reply:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type, "Accept": accept}
        return Reply(
            self._client.request(method, path, content=content, headers=headers, params=query)
        )

    def stream(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        timeout: httpx.Timeout,
        accept: str = JSON,
    ) -> AbstractContextManager[httpx.Response]:
        """A watch, line by line."""
        headers = {"Accept": accept}
        return self._client.stream(method, path, params=query, timeout=timeout, headers=headers)

    # --- addresses ---------------------------------------------------------------------------
    def path(
        self, kind: str, namespace: str = "", name: str = "", sub: str = "", version: str = ""
    ) -> str:
        group_version = version or GROUP_VERSIONS.get(kind, "v1")
        prefix = "/api/v1" if group_version == "v1" else f"/apis/{group_version}"
        plural, is_namespaced = self._plural(prefix, kind)
        parts = [prefix]
        if namespace and is_namespaced:
            parts.append(f"namespaces/{namespace}")
        return "/".join([*parts, plural, *([name] if name else []), *([sub] if sub else [])])

    def _plural(self, prefix: str, kind: str) -> tuple[str, bool]:
        if (prefix, kind) not in self._plurals:
            for resource in self.request("GET", prefix).must()["resources"]:
                if "/" not in resource["name"]:
                    found = (resource["name"], bool(resource["namespaced"]))
                    self._plurals[prefix, resource["kind"]] = found
        return self._plurals[prefix, kind]

    def path_of(self, obj: Obj, sub: str = "", *, with_name: bool = True) -> str:
        meta = obj["metadata"]
        name = meta["name"] if with_name else ""
        return self.path(obj["kind"], meta.get("namespace", ""), name, sub, obj["apiVersion"])

    # --- verbs -------------------------------------------------------------------------------
    def get(self, kind: str, namespace: str, name: str) -> Obj | None:
        reply = self.request("GET", self.path(kind, namespace, name))
        return None if reply.status == 404 else reply.must()

    def list(self, kind: str, namespace: str = "", selector: str = "") -> list[Obj]:
        query = {"labelSelector": selector} if selector else {}
        return list(self.request("GET", self.path(kind, namespace), **query).must()["items"])

    def create(self, obj: Obj, **query: Any) -> Reply:
        path = self.path_of(obj, with_name=False)
        return self.request("POST", path, obj, fieldManager="test", **query)

    def replace(self, obj: Obj, **query: Any) -> Reply:
        return self.request("PUT", self.path_of(obj), obj, fieldManager="test", **query)

    def apply(
        self, obj: Obj, manager: str = "test", *, force: bool = False, sub: str = "", **query: Any
    ) -> Reply:
        """Server-side apply; pass dryRun="All" or fieldValidation="Strict" as wanted."""
        if force:
            query["force"] = "true"
        path = self.path_of(obj, sub)
        return self.request("PATCH", path, obj, APPLY, fieldManager=manager, **query)

    def merge(
        self,
        kind: str,
        namespace: str,
        name: str,
        change: Obj,
        sub: str = "",
        manager: str = "test",
    ) -> Reply:
        path = self.path(kind, namespace, name, sub)
        return self.request("PATCH", path, change, MERGE, fieldManager=manager)

    def delete(self, kind: str, namespace: str, name: str, **options: Any) -> Reply:
        options.setdefault("propagationPolicy", "Background")
        body = {"kind": "DeleteOptions", "apiVersion": "v1", **options}
        return self.request("DELETE", self.path(kind, namespace, name), body)

    def table(self, kind: str, namespace: str) -> tuple[list[str], list[list[Any]]]:
        """What kubectl get prints: names of columns, cells of rows."""
        accept = "application/json;as=Table;v=v1;g=meta.k8s.io"
        body = self.request("GET", self.path(kind, namespace), accept=accept).must()
        columns = [column["name"] for column in body["columnDefinitions"]]
        return columns, [row["cells"] for row in body["rows"]]

    # --- shortcuts ---------------------------------------------------------------------------
    def namespace(self, name: str, **labels: str) -> str:
        body = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels},
        }
        self.apply(body).must()
        return name

    def install(self, definition: Obj) -> None:
        """Applies a CustomResourceDefinition and waits until it is served."""
        self.apply(definition, force=True).must()
        group, names = definition["spec"]["group"], definition["spec"]["names"]
        version = definition["spec"]["versions"][0]["name"]

        def is_served() -> bool:
            listed = self.request("GET", f"/apis/{group}/{version}").body.get("resources", ())
            known = any(resource["name"] == names["plural"] for resource in listed)
            return known and self.request("GET", f"/apis/{group}/{version}/{names['plural']}").ok

        wait_until(f"{names['kind']} is served", is_served)

    def wait(
        self,
        kind: str,
        namespace: str,
        name: str,
        condition: Callable[[Obj | None], Any],
        timeout_seconds: float = 180.0,
    ) -> Obj | None:
        """The object once the condition holds (None stands for absence)."""
        seen: list[Obj | None] = []

        def holds() -> bool:
            seen[:] = [self.get(kind, namespace, name)]
            return bool(condition(seen[0]))

        try:
            wait_until(f"{kind} {namespace}/{name} as asked for", holds, timeout_seconds)
        except TimeoutError as error:
            shown = json.dumps(seen[0], indent=1)[-3000:] if seen and seen[0] else "absent"
            raise TimeoutError(f"{error}; it is {shown}") from None
        return seen[0]
