"""Models, tokens, health, and what importing the HTTP side costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from foveal_runtime.frontend.protocol.responses import ModelList


async def test_models(harness: Any) -> None:
    models = ModelList.model_validate((await harness.http.get("/v1/models")).json())
    assert [model.id for model in models.data] == ["tiny"]
    assert models.data[0].max_model_len == 4096
    assert (await harness.http.get("/v1/models/tiny")).json()["id"] == "tiny"
    assert (await harness.http.get("/version")).json()["version"]


async def test_tokenize_and_back(harness: Any) -> None:
    response = await harness.http.post(
        "/tokenize", json={"prompt": "hé", "return_token_strs": True}
    )
    body = response.json()
    assert body["tokens"] == list("hé".encode())
    assert (body["count"], body["max_model_len"]) == (3, 4096)
    assert len(body["token_strs"]) == 3
    response = await harness.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert response.json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": [{"type": "image_url", "uuid": "u"}]}]
    body = {"messages": messages, "expand_media": False}
    response = await harness.http.post("/tokenize", json=body)
    assert response.json()["count"] == 4
    assert (await harness.http.post("/tokenize", json={})).status_code == 400
    response = await harness.http.post("/detokenize", json={"tokens": [999999]})
    assert response.json()["error"]["param"] == "tokens"


async def test_health_questions(harness: Any) -> None:
    http = harness.http
    for path in ("/livez", "/health", "/readyz"):
        assert (await http.get(path)).status_code == 200
    harness.processor.warm = False
    response = await http.get("/readyz")
    assert (response.status_code, response.json()["detail"]) == (
        503,
        "the first image is not warm yet",
    )
    harness.processor.warm = True
    harness.generator.num_engines = 0
    assert "engine" in (await http.get("/readyz")).json()["detail"]
    assert (await http.get("/livez")).status_code == 200


async def test_health_fails_with_the_engine(start: Any) -> None:
    async with start() as harness:
        harness.generator.healthy = False
        response = await harness.http.get("/health")
        assert response.status_code == 503
        assert response.headers["retry-after"]


def test_http_process_imports_no_torch(model_path: Path) -> None:
    """Loading, rendering, tokenising and detokenising included, not only the imports."""
    code = f"""
import sys
from foveal_runtime.frontend.http.app import build_app
from foveal_runtime.frontend.testing.fake import FakeGenerator, FakeInputProcessor
from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.plan.config import FrontendConfig, ModelConfig
processor = FakeInputProcessor({{"image": (260, "<image>")}})
app = build_app(
    FrontendConfig(model=ModelConfig(path={str(model_path)!r})),
    processor=processor, info=processor, generator=FakeGenerator(lambda _: [], 256),
)
talk = app.service.template.render([Message(role="user", content="hi")])
ids = app.service.template.encode(talk, add_special_tokens=False)
assert app.service.tokenizer.decode(ids), ids
bad = [name for name in ("torch", "torchvision", "numba", "scipy") if name in sys.modules]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
