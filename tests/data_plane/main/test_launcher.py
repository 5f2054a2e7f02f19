"""How a launcher asks its children."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal_runtime.main.launcher import Child
from foveal_runtime.plan.config import FrontendConfig, ModelConfig
from tests.support.loopback_server import LoopbackHandler, LoopbackServer


class _Ready(LoopbackHandler):
    def do_GET(self) -> None:
        self.send(200 if self.path == "/readyz" else 404)


def test_a_proxy_is_not_asked_for_processes_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HTTP_PROXY in the environment nothing was ever ready: the proxy was asked for 127.0.0.1,
    and `foveal serve` gave up after its start timeout."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with LoopbackServer(_Ready).running() as server:
        config = FrontendConfig(
            model=ModelConfig(path="model"), host="127.0.0.1", port=server.server_port
        )
        assert Child(config, tmp_path, {}).is_ready()
