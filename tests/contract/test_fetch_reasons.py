"""What the runtime says when a hub refuses it, read by the operator: both sides for real."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from foveal_operator.model.job_state import read_job


class _Hub(BaseHTTPRequestHandler):
    """Answers /api/models/a/CODE... with that status, as the hub does."""

    def do_GET(self) -> None:
        code = int(self.path.partition("?")[0].split("/")[4])
        self.send_response(code)
        names = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}
        self.send_header("X-Error-Code", names.get(code, ""))
        self.send_header("X-Error-Message", "it is so")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("code", "reason"),
    [(401, "FetchDenied"), (403, "FetchDenied"), (404, "NotFound"), (400, "FetchFailed")],
)
def test_a_hubs_refusal_has_a_reason(hub: str, tmp_path: Path, code: int, reason: str) -> None:
    command = ["fetch", f"hf://a/{code}", "--to", str(tmp_path / "model")]
    done = subprocess.run(
        [sys.executable, "-m", "foveal_runtime.main.cli", *command],
        env={**os.environ, "HF_ENDPOINT": hub, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "x",
             "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=110,
    )  # fmt: skip
    assert done.returncode == 2
    status = {"exitCode": 2, "message": done.stderr[-2048:]}
    pod = {
        "metadata": {"name": "f", "labels": {"job-name": "fetch"}},
        "status": {"containerStatuses": [{"name": "fetch", "state": {"terminated": status}}]},
    }
    state = read_job({"metadata": {"name": "fetch"}, "status": {}}, "fetch", [pod])
    assert state.fetch_reason().name == reason, done.stderr
