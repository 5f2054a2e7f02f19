"""Whatever fits, or nearly fits, the OpenAPI document: no 5xx, and answers as documented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance, status_code_conformance

from foveal_runtime.frontend.http.app import build_app
from foveal_runtime.frontend.testing.fake import FakeGenerator, FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, IMAGE
from foveal_runtime.plan.config import FrontendConfig, ModelConfig

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/tokenize",
    "/detokenize",
    "/v1/models/{model}",
)


@pytest.fixture(scope="module")
def schema(model_path: Path) -> Any:
    processor = FakeInputProcessor({"image": (IMAGE, "<image>")})
    app = build_app(
        FrontendConfig(model=ModelConfig(path=str(model_path)), task="both"),
        processor=processor,
        info=processor,
        generator=FakeGenerator(lambda _: list(b"Hello"), EOS),
    )
    found = schemathesis.openapi.from_asgi("/openapi.json", app.asgi)
    found.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    return found


WITHOUT_INPUT = {
    "/", "/livez", "/readyz", "/health", "/ping", "/load", "/metrics", "/v1/models",
    "/tokenizer_info", "/debug/mirrors", "/version",
}  # fmt: skip
"""Paths that take nothing that could be wrong."""


def test_every_path_that_takes_input_is_tried(schema: Any) -> None:
    found = {operation.ok().path for operation in schema.get_all_operations()}
    assert found - WITHOUT_INPUT <= set(PATHS) <= found


@pytest.mark.parametrize("path", PATHS)
def test_no_server_errors(schema: Any, path: str) -> None:
    operation = schema[path]["GET" if "{" in path else "POST"]

    @given(case=operation.as_strategy())
    @settings(
        max_examples=40, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    def run(case: Any) -> None:
        response = case.call()
        if response.status_code == 503:
            assert response.headers["retry-after"]
            return
        checks = [not_a_server_error, status_code_conformance]
        if "event-stream" not in response.headers.get("content-type", [""])[0]:
            checks.append(response_schema_conformance)
        case.validate_response(response, checks=checks)

    run()


TEXTS = (
    st.none() | st.text(max_size=40) | st.integers()
    | st.sampled_from(["data:application/pdf;base64,JVBERi0=", "data:,", "data:text/plain,x",
                       "http://[", "https://example.org/a.pdf", "file:///etc/passwd", "JVBERi0="])
)  # fmt: skip
FIELDS = st.dictionaries(st.sampled_from(["file_data", "file_url", "file_id", "filename"]), TEXTS)
DOCUMENTS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("file"), "file": FIELDS | TEXTS}),
        FIELDS.map(lambda fields: {"type": "input_file", **fields}),
        st.fixed_dictionaries(
            {"type": st.just("image_embeds"), "image_embeds": TEXTS}, optional={"uuid": TEXTS}
        ),
    ),
    max_size=3,
)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"), ("/tokenize", "messages"),
        ("/v1/embeddings", "messages"), ("/v1/responses", "input"),
    ],
)  # fmt: skip
def test_no_document_ends_in_a_server_error(schema: Any, path: str, field: str) -> None:
    operation = schema[path]["POST"]

    @given(parts=DOCUMENTS)
    @settings(
        max_examples=40, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )  # fmt: skip
    def run(parts: list[Any]) -> None:
        body = {"model": "tiny", field: [{"role": "user", "content": parts}]}
        response = operation.Case(body=body, media_type="application/json").call()
        assert response.status_code in (200, 400), (response.status_code, response.text)

    run()
