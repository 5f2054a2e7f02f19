"""The OpenAPI document as this server really behaves: errors in its own shape, streams, keys.

Applied by app.py to what FastAPI derives from the models.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse

from foveal_runtime.frontend.http.pages import page_response
from foveal_runtime.frontend.protocol.responses import ChatCompletionChunk

_STREAMS = {
    "/v1/chat/completions": "ChatCompletionChunk",
    "/v1/completions": "Completion",
    "/v1/messages": "",
    "/v1/responses": "",
    "/v1/audio/transcriptions": "",
    "/v1/audio/translations": "",
}
"""The type of each event; "": many types."""
_OPEN_TAGS = frozenset({"server"})


def describe(api: FastAPI, *, needs_key: bool, with_page: bool) -> None:
    """Replaces `api.openapi` and adds /docs and, `with_page`, the chat at /."""
    derive = api.openapi

    def openapi() -> dict[str, Any]:
        if api.openapi_schema is None:
            api.openapi_schema = _corrected(derive(), needs_key)
        return api.openapi_schema

    api.openapi = openapi  # type: ignore[method-assign]

    @api.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return page_response("docs")

    if with_page:

        @api.get("/", include_in_schema=False)
        async def chat() -> HTMLResponse:
            return page_response("chat")


def _corrected(document: dict[str, Any], needs_key: bool) -> dict[str, Any]:
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    chunk = ChatCompletionChunk.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(chunk.pop("$defs", {}))
    schemas["ChatCompletionChunk"] = chunk
    for path, methods in document["paths"].items():
        for operation in methods.values():
            # The framework would answer 422 for bad bodies; this server answers 400.
            operation["responses"].pop("422", None)
            if path in _STREAMS:
                content = operation["responses"]["200"]["content"]
                named = {"$ref": f"#/components/schemas/{_STREAMS[path]}"}
                content["text/event-stream"] = {"schema": named if _STREAMS[path] else {}}
            if needs_key and not _OPEN_TAGS & set(operation.get("tags", ())):
                operation["security"] = [{"key": []}]
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document
