"""POST /v1/audio/transcriptions and /v1/audio/translations: a form to a chat request, its text."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from foveal_runtime.frontend.engines.sequence import Delta
from foveal_runtime.frontend.grammars.reader import CallPiece
from foveal_runtime.frontend.http.answers import Tally
from foveal_runtime.frontend.http.apis.chat_translation import (
    Event,
    answer,
    as_sent,
    parsed,
    plan,
)
from foveal_runtime.frontend.http.service import Service, scope_of
from foveal_runtime.frontend.protocol.rules import check_extra
from foveal_runtime.frontend.protocol.transcription import (
    FORM,
    Transcript,
    TranscriptionRequest,
    chat_fields,
    checked,
    family_of,
    format_of,
    read_form,
    sent_paths,
)
from foveal_runtime.plan.errors import InvalidRequest

_THREAD_BYTES = 1 << 20
T = TypeVar("T")


def build_transcription_router(
    service: Service, errors: dict[int | str, dict[str, Any]]
) -> APIRouter:
    router = APIRouter(tags=["OpenAI"])
    family = family_of(service.config.model.path)

    async def write(request: Request, *, translates: bool) -> Response:
        kind = request.headers.get("content-type", "")
        body = await request.body()
        fields, file = await _worked(len(body), partial(read_form, kind, body))
        if file is None or not file.data:
            raise InvalidRequest("the form has no field `file`, or it is empty", param="file")
        given = parsed(TranscriptionRequest, checked(fields, translates=translates))
        check_extra(given.model_extra or {}, service.config.ignore_unknown_options)
        data = await _worked(len(file.data), partial(base64.b64encode, file.data))
        audio = {"data": data.decode(), "format": format_of(file)}
        chat = chat_fields(given, family, audio, translates=translates)
        with as_sent(lambda: [sent_paths(chat["messages"])]):
            run = await plan(service, chat, scope_of(service, request))
            writer = TranscriptWriter("" if chat.get("continue_final_message") else family.marker)
            response = await answer(request, run, writer, given.stream)
        if given.stream or given.response_format != "text":
            return response
        return PlainTextResponse(writer.body()["text"])

    @router.post(
        "/v1/audio/transcriptions", response_model=Transcript, responses=errors,
        openapi_extra={"requestBody": FORM},
    )  # fmt: skip
    async def transcriptions(request: Request) -> Response:
        """Writes down the speech of an audio file. With `stream` the answer is
        text/event-stream."""
        return await write(request, translates=False)

    @router.post(
        "/v1/audio/translations", response_model=Transcript, responses=errors,
        openapi_extra={"requestBody": FORM},
    )  # fmt: skip
    async def translations(request: Request) -> Response:
        """Writes the speech of an audio file down in English."""
        return await write(request, translates=True)

    return router


async def _worked(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; in a thread where it has many bytes to go through."""
    return await asyncio.to_thread(work) if size > _THREAD_BYTES else work()


class TranscriptWriter:
    """The text as it comes. What stands before `marker` is the language that the model heard."""

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._text = ""
        self._usage: Event = {}

    def begin(self, tally: Tally) -> list[Event]:
        return []

    def reasoning(self, text: str) -> list[Event]:
        return []

    def call(self, piece: CallPiece) -> list[Event]:
        return []

    def text(self, text: str, scores: Sequence[Any] = ()) -> list[Event]:
        if self._marker:
            self._held += text
            _, found, text = self._held.partition(self._marker)
            if not found:
                return []
            self._marker = ""
        if not text:
            return []
        self._text += text
        return [{"type": "transcript.text.delta", "delta": text}]

    def end(self, delta: Delta, tally: Tally) -> list[Event]:
        events = []
        if self._marker:  # it wrote none: all of it is text
            self._marker = ""
            events = self.text(self._held)
        usage = tally.usage()
        self._usage = {
            "type": "tokens",
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "total_tokens": usage["total_tokens"],
        }
        return [*events, {"type": "transcript.text.done", **self.body()}]

    def fail(self, error: Event) -> list[Event]:
        return [{"type": "error", **error}]

    def body(self) -> Event:
        return {"text": self._text, "usage": self._usage}
