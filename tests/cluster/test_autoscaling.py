"""A real HorizontalPodAutoscaler takes frontends up and down; the operator does not fight it.

The CPU use that it sees comes from a metrics API of the test's own, which the API server reaches
through an APIService, as it would metrics-server.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.node import commands

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
GROUP = "metrics.k8s.io"


class Metrics(ThreadingHTTPServer):
    """`millicores` is what every frontend pod seems to use."""

    daemon_threads = True
    millicores = 5

    def __init__(self, folder: Path) -> None:
        super().__init__((commands.HOST_IP, 0), _Handler)
        key, certificate = str(folder / "key"), str(folder / "certificate")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
             "-nodes", "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=metrics"],
            check=True, capture_output=True, timeout=30,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.socket = context.wrap_socket(self.socket, server_side=True)

    def pod_metrics(self) -> commands.Obj:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        usage = {"cpu": f"{self.millicores}m", "memory": "100Mi"}
        items = [
            {
                "metadata": {"name": name, "namespace": "default"},
                "timestamp": now,
                "window": "1s",
                "containers": [{"name": "frontend", "usage": usage}],
            }
            for name in commands.pods("frontend")
        ]
        return {"kind": "PodMetricsList", "apiVersion": f"{GROUP}/v1beta1", "items": items}


class _Handler(BaseHTTPRequestHandler):
    server: Metrics
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        return

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].rstrip("/")
        root = f"/apis/{GROUP}/v1beta1"
        pods = {"name": "pods", "kind": "PodMetrics", "namespaced": True, "verbs": ["get", "list"]}
        found: commands.Obj | None = None
        if path == root:
            found = {"kind": "APIResourceList", "apiVersion": "v1",
                     "groupVersion": f"{GROUP}/v1beta1", "resources": [pods]}  # fmt: skip
        elif path == f"{root}/namespaces/default/pods":
            found = self.server.pod_metrics()
        body = json.dumps(found or {}).encode()
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def metrics(cluster: None, tmp_path: Path) -> Iterator[Metrics]:
    server = Metrics(tmp_path)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    port = {"name": "https", "port": 443, "targetPort": server.server_port}
    commands.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "metrics"},
         "spec": {"ports": [port]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
         "metadata": {"name": "metrics", "labels": {"kubernetes.io/service-name": "metrics"}},
         "addressType": "IPv4", "ports": [{"name": "https", "port": server.server_port}],
         "endpoints": [{"addresses": [commands.HOST_IP], "conditions": {"ready": True}}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
         "metadata": {"name": f"v1beta1.{GROUP}"},
         "spec": {"group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100,
                  "versionPriority": 100, "insecureSkipTLSVerify": True,
                  "service": {"name": "metrics", "namespace": "default"}}},
    )  # fmt: skip
    commands.kubectl("wait", f"apiservice/v1beta1.{GROUP}", "--for=condition=Available",
                "--timeout=60s")  # fmt: skip
    yield server
    commands.kubectl("delete", f"apiservice/v1beta1.{GROUP}", "service/metrics",
                "endpointslice/metrics", "--ignore-not-found")  # fmt: skip
    server.shutdown()
    server.server_close()
    thread.join(10)


def test_an_autoscaler_takes_frontends_up_and_down(tiny: str, metrics: Metrics) -> None:
    scaling = {"minReplicas": 1, "maxReplicas": 3, "scaleDownStabilizationSeconds": 0}
    engines = commands.uids(commands.pods("engine"))

    def count(wanted: int) -> bool:
        deployment = commands.get("deployment", "tiny-frontend")
        ready = deployment["status"].get("readyReplicas")
        return bool(
            deployment["spec"]["replicas"] == ready == wanted == len(commands.pods("frontend"))
        )

    metrics.millicores = 300
    commands.patch("tiny", {"frontend": {"replicas": None, "autoscaling": scaling}})
    try:
        commands.until("three frontends", lambda: count(3), 400)
        commands.until("Ready with them", lambda: commands.is_current("tiny"), 120)
        metrics.millicores = 5
        commands.until("one frontend", lambda: count(1), 400)
        commands.until("Ready with it", lambda: commands.is_current("tiny"), 120)
        assert commands.uids(commands.pods("engine")) == engines
        assert commands.ask(tiny, "which digit is this?", "digit-7.png")
    finally:
        commands.patch("tiny", {"frontend": {"replicas": 2, "autoscaling": None}})
        commands.until("two frontends again", lambda: count(2), 300)
