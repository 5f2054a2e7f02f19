"""What the runtime says when a hub refuses it, read by the operator: both sides for real."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.refused_fetch import reason_of


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
    environment = {
        "HF_ENDPOINT": hub, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "x",
        "HF_HOME": str(tmp_path),
    }  # fmt: skip
    found, text = reason_of(f"hf://a/{code}", tmp_path / "model", environment)
    assert found == reason, text


def test_a_hub_that_cannot_be_reached_is_named_with_the_remedy(tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    found, text = reason_of("hf://a/b", tmp_path / "model", environment)
    assert found == "FetchFailed"
    assert "hf://a/b: the hub at http://127.0.0.1:9 does not answer (" in text
    assert "refused): check the network, HF_ENDPOINT and proxies" in text
