"""Other projects' agents, unmodified, against real processes; `make clients` installs them.

The bundled model was not trained for their tasks: what they ask of a server is tried here, not how
well it does.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.processes.chat_page import CHROMIUM

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("FOVEAL_AGENTS", ROOT / ".venv" / "agents")) / "bin" / "python"
SCRIPT = ROOT / "tests" / "support" / "processes" / "agents.py"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the agents"),
]


def run(agent, asker, steps):
    """What the agent did, and the prompt tokens and cached ones that it brought."""
    names = ("vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total")
    before = [asker.metric(name) for name in names]
    task = {"agent": agent, "url": asker.url, "steps": steps, "chromium": CHROMIUM}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [PYTHON, SCRIPT], input=json.dumps(task), env={**os.environ, "TMPDIR": folder},
            capture_output=True, text=True, timeout=800, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), [
        asker.metric(name) - old for name, old in zip(names, before, strict=True)
    ]


def test_a_coding_agent_calls_its_tool_step_by_step(shared):
    found, (prompts, cached) = run("mini-swe-agent", shared[1], 4)
    assert found["status"] == "LimitsExceeded", found  # it ended by its own limit, not by an error
    assert found["requests"] == 4
    assert found["called"] == len(found["commands"]) >= 2, found
    assert cached > prompts / 2  # each request repeats the last one


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_agent_acts_on_what_is_answered(shared):
    images = shared[1].metric("foveal_media_items_processed_total")
    found, (prompts, cached) = run("browser-use", shared[1], 3)
    assert found["requests"] == found["screenshots"] == 3, found
    assert found["acted"] >= 3, found
    assert shared[1].metric("foveal_media_items_processed_total") > images
    assert cached > prompts / 3
