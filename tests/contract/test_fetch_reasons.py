"""What the runtime says when a hub refuses it, read by the operator: both sides for real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loopback_server import LoopbackHandler, LoopbackServer
from tests.support.refused_fetch import reason_of


class _Hub(LoopbackHandler):
    """Answers /api/models/a/CODE... with that status, as the hub does."""

    def do_GET(self) -> None:
        code = int(self.path.partition("?")[0].split("/")[4])
        names = {401: "RepoNotFound", 403: "GatedRepo", 404: "RepoNotFound"}
        headers = {"X-Error-Code": names.get(code, ""), "X-Error-Message": "it is so"}
        self.send(code, b"{}", headers)

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with LoopbackServer(_Hub).running() as server:
        yield server.url


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
