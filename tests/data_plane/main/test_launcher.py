"""How a launcher asks its children, and what it leaves behind."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from foveal_runtime.main.frontend import Member
from foveal_runtime.main.http_process import _counts_file
from foveal_runtime.main.launcher import Child
from foveal_runtime.main.local.launch import launch
from foveal_runtime.plan.config import FrontendConfig, ModelConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import COUNTS_VARIABLE, LocalDeploymentConfig
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


def test_a_frontend_that_starts_again_counts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums that its neighbours show fell, which Prometheus takes for a restart of them all."""
    (tmp_path / "frontend-0.counts").write_text("of yesterday")
    show = ("/bin/sh", "-c", f'echo "${COUNTS_VARIABLE}"')
    child = Child(FrontendConfig(model=ModelConfig(path="model")), tmp_path, {}, show)
    assert not (tmp_path / "frontend-0.counts").exists()
    for _ in range(2):
        child.start()
        assert child.process is not None
        child.process.wait()
    file = tmp_path / "frontend-0.counts"
    assert child.log_path.read_text() == f"{file}\n" * 2
    assert _counts_file(None) is None
    assert _counts_file(Member(1, "/sockets")) == Path("/sockets/1.counts")
    monkeypatch.setenv(COUNTS_VARIABLE, str(file))
    assert _counts_file(None) == file
    assert _counts_file(Member(1, "/sockets")) == Path(f"{file}.1")


def test_a_start_without_logs_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        frontend = FrontendConfig(model=ModelConfig(path="model"), host="127.0.0.1", port=port)
        with pytest.raises(StartupError, match="in use"):
            launch(LocalDeploymentConfig(name="m", engines=(), frontends=(frontend,)))
    assert not list(tmp_path.iterdir())
