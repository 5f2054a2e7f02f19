"""A planned restart: hot encoder outputs are there again, and only those of the same model."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]


def ask(asker, seed: int) -> str:
    from tests.support.processes.pictures import answer_of, question

    return answer_of(asker.http.post("/v1/chat/completions", json=question(seed)))


def restart_engine(deployment, start_seconds) -> None:
    """SIGTERM: the engine drains, saves and ends by itself."""
    child = deployment.engines[0]
    child.signal(signal.SIGTERM)
    assert child.process.wait(120) == 0, child.last_lines()
    child.start()
    deadline = time.monotonic() + start_seconds
    while not child.is_ready():
        assert child.is_alive, child.last_lines()
        assert time.monotonic() < deadline
        time.sleep(0.1)


def encoder_counts(engine) -> tuple[float, float]:
    """(hits, items encoded) of the engine process that runs now."""
    hits = engine.metric("foveal_cache_hits_total", cache="encoder")
    return hits, engine.metric("foveal_encoder_items_total")


@pytest.mark.parametrize(
    "tier",
    [
        pytest.param({}, id="device alone"),
        pytest.param(
            {"encoder_host_bytes": 1 << 20, "encoder_embeds": 72},
            id="with host tier",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_the_first_repeat_after_a_restart_is_not_encoded(
    start, asker_for, tmp_path, start_seconds, tier
):
    deployment, (asker,) = start(warm_directory=str(tmp_path), prefix_caching=False, **tier)
    engine = asker_for(deployment.engines[0].url)
    seeds = range(5)
    before = {seed: ask(asker, seed) for seed in seeds}
    assert encoder_counts(engine) == (0, len(before))
    restart_engine(deployment, start_seconds)
    assert list(tmp_path.glob("engine-0/*.safetensors"))
    for seed in reversed(seeds):
        assert ask(asker, seed) == before[seed]
    assert encoder_counts(engine) == (len(before), 0)
    ask(asker, 99)
    assert encoder_counts(engine) == (len(before), 1)


@pytest.mark.extended
def test_another_revision_takes_nothing_over(start, deploy, asker_for, tmp_path, start_seconds):
    """The same weights in a directory with other settings are another model."""
    model = tmp_path / "model"
    shutil.copytree(deploy().engines[0].config.model.path, model)
    deployment, (asker,) = start(model=str(model), warm_directory=str(tmp_path / "warm"))
    engine = asker_for(deployment.engines[0].url)
    before = ask(asker, 1)
    frontend = deployment.frontends[0]
    frontend.signal(signal.SIGTERM)
    frontend.process.wait(60)
    change(model / "generation_config.json")
    restart_engine(deployment, start_seconds)
    frontend.start()
    deployment.wait_ready(start_seconds)
    said = deployment.engines[0].log_path.read_text()
    assert "is not used: it was made with another namespace" in said
    assert ask(asker, 1) == before
    assert encoder_counts(engine) == (0, 1)


def change(path: Path) -> None:
    """Another file with the same meaning."""
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "foveal_test": 1}))
