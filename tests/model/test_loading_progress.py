"""What an engine's log says while weights are loaded, by transformers' own count of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from foveal_runtime.model.checkpoint import loader, weights
from foveal_runtime.plan.quantity import short_bytes
from tests.support.markdown import ROOT

MODEL = str(ROOT / "examples/tiny-vlm/model")


def test_files_bytes_tensors_and_what_comes_next(capfd: pytest.CaptureFixture[str]) -> None:
    """Every reading of the clock is a pause later, so that each tensor is told."""
    said: list[str] = []
    now = iter(range(0, 1_000_000, int(weights.PAUSE_SECONDS)))
    with weights.told_loading(MODEL, said.append, lambda: float(next(now))):
        loader.load_model(MODEL)
    size = (Path(MODEL) / "model.safetensors").stat().st_size
    assert said[0].startswith("loading 1 weight file, ")
    assert short_bytes(size) in said[0]
    assert all(line.endswith("; KV memory and warm-up come next") for line in said)
    total = int(said[1].split(" tensors")[0].rpartition(" ")[2])
    assert len(said) == 1 + total > 20
    assert f"{0:.0%}, 0 of {total}" in said[1]
    assert f"{total - 1} of {total} tensors" in said[-1]
    assert "Loading weights" not in capfd.readouterr().err, "a bar for terminals"


def test_a_load_that_fails_leaves_the_bars_as_they_were() -> None:
    from transformers.utils import logging as theirs

    with pytest.raises(ValueError), weights.told_loading(MODEL):
        raise ValueError
    assert theirs.set_tqdm_hook(None) is None


def test_it_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), weights.told_loading(MODEL):
        pass
    assert "loading 1 weight file" in caplog.text
