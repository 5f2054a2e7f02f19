"""Reads of the API server over a kept connection, for tests that ask all the time.

A kubectl costs a tenth of a second of a processor, and a test that waits asks many times a second:
on two cores that is taken from what it waits for. Used by commands.py; what tests change they
change by kubectl, as people do.
"""

from __future__ import annotations

import http.client
import json
import ssl
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

PATHS = {
    "pods": "api/v1/namespaces/{}/pods",
    "service": "api/v1/namespaces/{}/services",
    "deployment": "apis/apps/v1/namespaces/{}/deployments",
    "mmi": "apis/foveal.dev/v1alpha1/namespaces/{}/multimodalinferences",
}
"""Kinds as tests name them; of others kubectl knows the path."""


class Reader:
    """As the kubeconfig's user, whose certificate and key lie beside it. Threads may share it."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        self._host = str(config["clusters"][0]["cluster"]["server"]).removeprefix("https://")
        folder, user = kubeconfig.parent, kubeconfig.name.partition(".")[0]
        self._tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        self._tls.load_cert_chain(folder / f"{user}.crt", folder / f"{user}.key")
        self._kept = threading.local()
        self._all: list[http.client.HTTPSConnection] = []

    def get(self, kind: str, name: str, namespace: str, selector: str) -> dict[str, Any]:
        """One object, or a list. Raises AssertionError with the server's words when it refuses."""
        path = f"/{PATHS[kind].format(namespace)}" + (f"/{name}" if name else "")
        path += f"?{urlencode({'labelSelector': selector})}" if selector else ""
        status, text = self._ask(path)
        assert status == 200, f"GET {path}: {status}: {text[:500]}"
        found: dict[str, Any] = json.loads(text)
        return found

    def _ask(self, path: str) -> tuple[int, str]:
        kept: http.client.HTTPSConnection | None = getattr(self._kept, "connection", None)
        if kept is not None:
            try:
                return self._ask_over(kept, path)
            except (http.client.HTTPException, OSError):
                kept.close()  # the server ends what was idle for long
        made = http.client.HTTPSConnection(self._host, timeout=20, context=self._tls)
        self._kept.connection = made
        self._all.append(made)
        return self._ask_over(made, path)

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    @staticmethod
    def _ask_over(connection: http.client.HTTPSConnection, path: str) -> tuple[int, str]:
        connection.request("GET", path, headers={"Accept": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
