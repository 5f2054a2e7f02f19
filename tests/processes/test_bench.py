"""`foveal bench` against the real server: its counters see what the traces promise."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from foveal_runtime.bench.report import Report

pytestmark = [pytest.mark.timeout(900), pytest.mark.extended]


def test_the_cache_scenarios_hit_the_caches_they_name(shared, tmp_path):
    file = tmp_path / "bench.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "foveal_runtime.main.cli", "bench", shared[1].url,
            "--traces", "identical,same-image-other-text,partial-prefix,multi-turn,hits-0",
            "--requests", "12", "--words", "16", "--concurrency", "1", "--max-tokens", "4",
            "--image", "64x64", "--json", file,
        ],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    by = {result.trace: result for result in report.results}
    cached = {name: r.num_cached_tokens / r.num_prompt_tokens for name, r in by.items()}
    assert by["identical"].hit_rates["media"] == pytest.approx(0.75)
    assert by["same-image-other-text"].hit_rates["media"] == pytest.approx(0.75)
    assert by["same-image-other-text"].hit_rates["processor"] == pytest.approx(0.75)
    assert by["partial-prefix"].hit_rates["media"] == by["hits-0"].hit_rates["media"] == 0
    assert cached["hits-0"] < cached["same-image-other-text"] < cached["identical"]
    assert cached["partial-prefix"] > 0.5
    assert cached["multi-turn"] > cached["hits-0"]
