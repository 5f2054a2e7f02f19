"""The audio API: its forms, and their translation to a chat request by the family's own prompt.

Read by http/apis/transcription.py. Every model that takes audio can be asked; those that were
trained to transcribe are asked in the words of their training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from email.message import Message
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from foveal_runtime.frontend.protocol.bounds import Open
from foveal_runtime.frontend.protocol.requests import Float, Integer
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

MAX_FIELDS = 64
_MAX_HEAD_BYTES = 8192
_MAX_PARAMETERS = 32
"""Of a header: email.message reads them in time quadratic in their number."""
_FORMATS = ("json", "text")
_LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French",
    "he": "Hebrew", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch",
    "no": "Norwegian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "sv": "Swedish", "th": "Thai", "tr": "Turkish", "uk": "Ukrainian", "vi": "Vietnamese",
    "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip


class Family(NamedTuple):
    """How a family is asked.

    Attributes:
        text: beside the audio; before it where `is_first`.
        translate: the same for translations into English; "": it was not trained for them.
        language: how the language is said: in the text, as the answer's beginning, or not at all.
        prefill: that beginning, with {name} and {code} of the language.
        prompt: where the client's own context goes.
        marker: what the model writes between the language it heard and the text.
    """

    text: str = "Transcribe the speech in this audio. Answer with the transcript alone."
    translate: str = (
        "Translate the speech in this audio into English. Answer with the translation alone."
    )
    is_first: bool = False
    language: Literal["text", "prefill", ""] = "text"
    prefill: str = ""
    prompt: Literal["text", "system"] = "text"
    marker: str = ""


FAMILIES: Mapping[str, Family] = {
    "audioflamingo3": Family("Transcribe the input speech.", is_first=True),
    "glmasr": Family("Please transcribe this audio into text", ""),
    "fun_asr_nano": Family("", "", language=""),
    "qwen3_asr": Family(
        "", "", language="prefill", prefill="language {name}<asr_text>", prompt="system",
        marker="<asr_text>",
    ),
}  # fmt: skip


def family_of(model_path: str | Path) -> Family:
    """That of the checkpoint's config.json; the general one where it names none that is known."""
    try:
        document = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return Family()
    kind = document.get("model_type") if isinstance(document, dict) else None
    return FAMILIES.get(str(kind), Family())


def _flag(value: Any) -> Any:
    return {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower(), value)


class TranscriptionRequest(Open):
    """The fields beside `file`."""

    model: str | None = Field(None, max_length=1024)
    language: str | None = Field(None, max_length=32)
    prompt: str | None = Field(None, max_length=16_384)
    response_format: str | None = None
    temperature: Float | None = None
    seed: Integer | None = None
    top_p: Float | None = None
    top_k: Integer | None = None
    min_p: Float | None = None
    max_completion_tokens: Integer | None = None
    stream: Annotated[bool, BeforeValidator(_flag)] | None = None


class TranscriptUsage(BaseModel):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcript(BaseModel):
    text: str
    usage: TranscriptUsage


FORM: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "model": {"type": "string"},
                    "language": {"type": "string", "description": "a code such as en, or a name"},
                    "prompt": {"type": "string", "description": "names and words that may occur"},
                    "response_format": {"type": "string", "enum": list(_FORMATS)},
                    "temperature": {"type": "number"},
                    "stream": {"type": "boolean"},
                },
            }
        }
    },
}
"""The form as the OpenAPI document shows it."""


class FormFile(NamedTuple):
    """An uploaded file; `data` is a view of the body."""

    name: str
    content_type: str
    data: memoryview


def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], FormFile | None]:
    """(fields, the field `file`) of a multipart body. Raises InvalidRequest."""
    try:
        return _read_form(content_type, body)
    except ValueError as error:  # email.message: bytes, numbers and codecs of RFC 2231
        raise InvalidRequest("the form's headers cannot be read", param="file") from error


def _read_form(content_type: str, body: bytes) -> tuple[dict[str, str], FormFile | None]:
    """Raises ValueError where a header's parameters are damaged."""
    if content_type.count(";") > _MAX_PARAMETERS:
        raise InvalidRequest("the form's Content-Type has too many parameters", param="file")
    head = Message()
    head["content-type"] = content_type
    boundary = head.get_boundary()
    if head.get_content_type() != "multipart/form-data" or not boundary:
        raise InvalidRequest("send multipart/form-data with a field `file`", param="file")
    mark = b"--" + boundary.encode("ascii", "replace")
    fields: dict[str, str] = {}
    file: FormFile | None = None
    begin = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if begin == 1:
        raise InvalidRequest("the form's boundary does not occur in its body", param="file")
    for _ in range(MAX_FIELDS + 1):
        begin += len(mark)
        if body.startswith(b"--", begin):
            return fields, file
        end = body.find(b"\r\n" + mark, begin)
        blank = body.find(b"\r\n\r\n", begin, begin + _MAX_HEAD_BYTES)
        if end < 0 or blank < 0 or blank > end:
            raise InvalidRequest("the form's body is cut off or no multipart/form-data")
        part = _head(body[begin:blank])
        data = memoryview(body)[blank + 4 : end] if blank + 4 <= end else memoryview(b"")
        name = str(part.get_param("name", "", header="content-disposition"))
        if name == "file":
            file = FormFile(part.get_filename() or "", part.get_content_type(), data)
        else:
            fields[name] = bytes(data).decode("utf-8", "replace")
        begin = end + 2
    raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")


def _head(raw: bytes) -> Message:
    if raw.count(b";") > _MAX_PARAMETERS:
        raise InvalidRequest("a field of the form has too many parameters")
    found = Message()
    for line in raw.decode("utf-8", "replace").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon:
            found[name.strip()] = value.strip()
    return found


def checked(fields: dict[str, str], *, translates: bool) -> dict[str, Any]:
    """Fields of TranscriptionRequest. Raises Unsupported for what cannot be honoured."""
    for name in ("timestamp_granularities[]", "timestamp_granularities"):
        if fields.pop(name, ""):
            raise Unsupported(
                "timestamp_granularities: this server gives no timestamps", param=name.rstrip("[]")
            )
    for name in ("include[]", "include"):
        if fields.pop(name, ""):
            raise Unsupported("include is not supported", param="include")
    wanted = fields.get("response_format") or "json"
    if wanted not in _FORMATS:
        raise Unsupported(
            f"response_format {wanted!r} needs timestamps, which this server does not give; use "
            "json or text",
            param="response_format",
        )
    if translates and fields.get("language"):
        raise Unsupported("language: translations are into English", param="language")
    if fields.get("chunking_strategy") == "auto":
        del fields["chunking_strategy"]
    return {name: value for name, value in fields.items() if value}


def format_of(file: FormFile) -> str:
    """What the audio part's `format` says; the content itself decides how it is read."""
    kind, _, subtype = file.content_type.partition("/")
    for found in (Path(file.name).suffix[1:].lower(), subtype if kind == "audio" else ""):
        if re.fullmatch(r"[a-z0-9.+-]{1,32}", found):
            return found
    return "wav"


def _named(language: str) -> tuple[str, str]:
    """(code, name) of a language. Raises InvalidRequest."""
    lower = language.strip().lower()
    for code, name in _LANGUAGES.items():
        if lower in (code, name.lower()) or lower.startswith(code + "-"):
            return code, name
    raise InvalidRequest(
        f"language {language!r} is not known; use one of {', '.join(_LANGUAGES)}", param="language"
    )


def chat_fields(
    request: TranscriptionRequest, family: Family, audio: Mapping[str, str], *, translates: bool
) -> dict[str, Any]:
    """The chat request: the audio and the family's words. Raises InvalidRequest."""
    if translates and not family.translate:
        raise Unsupported("this model transcribes and does not translate")
    texts = [family.translate if translates else family.text]
    messages: list[dict[str, Any]] = []
    if request.prompt and family.prompt == "system":
        messages.append({"role": "system", "content": request.prompt})
    prefill = ""
    if request.language:
        code, name = _named(request.language)
        if family.language == "text":
            texts.append(f"The speech is in {name}.")
        elif family.language == "prefill":
            prefill = family.prefill.format(name=name, code=code)
        else:
            raise Unsupported("language: this model hears by itself which it is", param="language")
    if request.prompt and family.prompt == "text":
        texts.append(request.prompt)
    text = "\n".join(one for one in texts if one)
    content: list[dict[str, Any]] = [{"type": "input_audio", "input_audio": audio}]
    if text:
        content.insert(0 if family.is_first else 1, {"type": "text", "text": text})
    messages.append({"role": "user", "content": content})
    # What the form does not declare is ignored: it may be a field of chat, such as messages.
    unknown = request.model_extra or {}
    fields = request.model_dump(
        exclude_none=True, exclude={"language", "prompt", "response_format", "model", *unknown}
    )
    fields.setdefault("temperature", 0)
    if prefill:
        messages.append({"role": "assistant", "content": prefill})
        fields["continue_final_message"] = True
    elif family.marker:
        fields["skip_special_tokens"] = False  # the marker may be one
    return {"model": request.model, "messages": messages, **fields}
