"""An admission webhook on loopback that denies what a rule matches, as another team's would."""

from __future__ import annotations

import base64
import contextlib
import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from foveal_operator.kube.types import Obj
from tests.support.api_server.api import Api

API = "admissionregistration.k8s.io/v1"
NAME = "images.policy.example"
WORDS = 'User "nobody" cannot run images that nobody has signed'


def _certificate(folder: Path) -> tuple[Path, Path]:
    key, certificate = folder / "hook.key", folder / "hook.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=hook", "-keyout", str(key)]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return key, certificate


class _Denies(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = {"code": 403, "reason": "Forbidden", "message": WORDS}
        response = {"uid": review["request"]["uid"], "allowed": False, "status": status}
        kept = {key: review[key] for key in ("apiVersion", "kind")}
        body = json.dumps({**kept, "response": response}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Tests read the API server's answers instead."""


@contextlib.contextmanager
def denying(api: Api, folder: Path, namespace: str, group: str, resource: str) -> Iterator[None]:
    """While it lasts, nobody can create or change objects of one resource in the namespace."""
    key, certificate = _certificate(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Denies)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name="webhook")
    thread.start()
    rule = {"apiGroups": [group], "apiVersions": ["*"], "resources": [resource]}
    hook: Obj = {
        "name": NAME,
        "clientConfig": {
            "url": f"https://127.0.0.1:{server.server_address[1]}/",
            "caBundle": base64.b64encode(certificate.read_bytes()).decode(),
        },
        "rules": [{**rule, "operations": ["CREATE", "UPDATE"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
    }
    metadata = {"name": f"{namespace}-hook"}
    kind = "ValidatingWebhookConfiguration"
    body = {"apiVersion": API, "kind": kind, "metadata": metadata, "webhooks": [hook]}
    try:
        api.create(body).must()
        yield
    finally:
        api.request("DELETE", api.path(kind, "", metadata["name"], version=API))
        server.shutdown()
        thread.join(10)
        server.server_close()
