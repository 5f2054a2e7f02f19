"""Other projects' clients, unmodified, against real processes; `make clients` installs them.

They pin older packages than ours, so each runs in their own environment.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import jsonschema
import pytest
from evaluate import to_request

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("FOVEAL_CLIENTS", ROOT / ".venv" / "clients")) / "bin" / "python"
SCRIPT = ROOT / "tests" / "support" / "processes" / "foreign_clients.py"
SCHEMA = {
    "type": "object", "required": ["shape", "count"],
    "properties": {
        "shape": {"enum": ["circle", "square"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 9},
    },
}  # fmt: skip
EXPECTED = {
    "litellm": {"whole", "stream", "bound"},
    "litellm-messages": {"same"},
    "langchain-openai": {"whole", "stream", "bound", "responses"},
    "instructor": {"bound"},
    "pydantic-ai": {"same", "bound"},
}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the clients"),
]


@pytest.mark.parametrize("client", EXPECTED)
def test_a_client_works_as_it_is(shared, samples, longest_reply, client):
    sample = next(sample for sample in samples if sample.pictures)
    task = {
        "client": client, "url": shared[1].url, "max_tokens": longest_reply,
        "messages": to_request(sample, "tiny-vlm")["messages"],
    }  # fmt: skip
    done = subprocess.run(
        [PYTHON, SCRIPT], input=json.dumps(task), capture_output=True, text=True, timeout=200,
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == EXPECTED[client]
    for kind in {"whole", "stream", "responses"} & set(found):
        assert found[kind] == sample.reference, kind
    if "bound" in found:
        jsonschema.validate(found["bound"], SCHEMA)
    if "same" in found:
        assert found["same"][0] == found["same"][1] != ""
