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
EVERY = {"whole", "stream", "text", "bound", "tools"}
"""An image, a stream, text alone, an answer that follows a schema, a call and its result."""
EXPECTED = {
    "litellm": EVERY | {"too-long"},
    "litellm-messages": EVERY | {"too-long"},
    "langchain-openai": EVERY | {"bound-by-call", "responses", "responses-tools"},
    # It asks for objects alone: its four modes, a stream of parts of one, and text alone.
    "instructor": {
        "bound", "bound-by-call", "bound-in-parallel", "bound-text", "bound-stream", "object",
    },
    "pydantic-ai": EVERY | {
        "bound-by-call", "responses", "responses-stream", "responses-bound", "responses-tools",
    },
    "llama-index": EVERY - {"bound"} | {"bound-by-call"},
    "lm-eval": {"said", "scores"},  # it knows texts and scores of texts only
}  # fmt: skip
OFFLINE = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
}  # fmt: skip

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="`make clients` installs the clients"),
]


@pytest.mark.parametrize("client", EXPECTED)
def test_a_client_works_as_it_is(shared, samples, longest_reply, client, tmp_path):
    single = [one for one in samples if [m["role"] for m in one.messages] == ["user"]]
    sample = next(one for one in single if one.pictures)
    text = next(one for one in single if not one.pictures)
    task = {
        "client": client, "url": shared[1].url, "max_tokens": longest_reply,
        "messages": to_request(sample, "tiny-vlm")["messages"],
        "text": to_request(text, "tiny-vlm")["messages"],
    }  # fmt: skip
    done = subprocess.run(
        [PYTHON, SCRIPT], input=json.dumps(task), capture_output=True, text=True, timeout=500,
        env={**os.environ, **OFFLINE, "HF_HOME": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == EXPECTED[client]
    for kind in {"whole", "stream", "responses", "responses-stream"} & set(found):
        assert found[kind] == sample.reference, kind
    if "text" in found:
        assert found["text"] == text.reference
    for kind in (kind for kind in found if "bound" in kind):
        jsonschema.validate(found[kind], SCHEMA)
    for kind in {"tools", "responses-tools"} & set(found):
        assert found[kind]["name"] == "look", kind
        jsonschema.validate(found[kind]["arguments"], SCHEMA)
        assert found[kind].get("reason", "tool_calls") == "tool_calls"
        assert found[kind]["after"], kind
    assert found.get("too-long", "ContextWindowExceededError") == "ContextWindowExceededError"
    if client == "lm-eval":
        assert len(found["said"]) == 3
        assert all(found["said"])
        scores = found["scores"]
        assert len(scores) == len(set(scores)) == 9
        assert all(score < 0 for score in scores)
