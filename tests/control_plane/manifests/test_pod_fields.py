"""One immutable document for all pods of a role: what only a pod knows is filled in at start."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal_runtime.plan.config import EngineConfig, load
from foveal_runtime.plan.errors import StartupError

DOCUMENT = (
    '{"engine_id": "$(POD_NAME)", "model": {"path": "/models"}, "node": "$(NODE_NAME)",'
    ' "bind": "tcp://$(POD_HOST):5570", "http_host": "$(POD_IP)", "attention": "$(HOME)"}'
)


@pytest.mark.parametrize(("ip", "host"), [("10.0.0.7", "10.0.0.7"), ("fd00::7", "[fd00::7]")])
def test_pod_fields_are_filled_in_and_nothing_else(tmp_path: Path, ip: str, host: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(DOCUMENT)
    environment = {"POD_NAME": "qwen-engine-3", "POD_IP": ip, "NODE_NAME": 'a"b', "HOME": "/root"}
    config = load(path, EngineConfig, environment)
    assert isinstance(config, EngineConfig)
    assert (config.engine_id, config.http_host, config.node) == ("qwen-engine-3", ip, 'a"b')
    assert config.bind == f"tcp://{host}:5570"
    assert config.attention == "$(HOME)"


def test_a_field_that_is_not_set_stops_the_process(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(DOCUMENT)
    with pytest.raises(StartupError, match=r"\$\(POD_NAME\).*not set"):
        load(path, EngineConfig, {})
