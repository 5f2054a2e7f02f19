"""The audio API: its forms, and their translation to a chat request by the family's own prompt.

Read by http/apis/transcription.py. Every model that takes audio can be asked; those that were
trained to transcribe are asked in the words of their training.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from foveal_runtime.frontend.protocol.bounds import Open
from foveal_runtime.frontend.protocol.requests import CacheSalt, Float, Integer
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

MAX_FIELDS = 64
_MAX_HEADER_BYTES = 4096
_MAX_PARAMETERS = 32
"""Of the Content-Type: they are split in time quadratic in their number."""
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
    cache_salt: CacheSalt | None = None
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
    """An uploaded file."""

    name: str
    content_type: str
    data: bytes


def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], FormFile | None]:
    """(fields, the field `file`) of a multipart body. Raises InvalidRequest."""
    if content_type.count(";") > _MAX_PARAMETERS:
        raise InvalidRequest("the form's Content-Type has too many parameters", param="file")
    kind, parameters = parse_options_header(content_type)
    boundary = parameters.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise InvalidRequest("send multipart/form-data with a field `file`", param="file")
    form = _Form()
    try:
        parser = MultipartParser(boundary, form.callbacks(), max_header_size=_MAX_HEADER_BYTES)
        before = body.find(b"\r\n--" + boundary)
        has_preamble = before >= 0 and not body.startswith(b"--" + boundary)
        parser.write(body[before + 2 :] if has_preamble else body)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"the form cannot be read: {error}", param="file") from error
    if not form.is_complete:
        raise InvalidRequest("the form's body is cut off or no multipart/form-data", param="file")
    return form.fields, form.file


class _Form:
    """What the parser says of a body, part by part."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self.file: FormFile | None = None
        self.is_complete = False
        self._parts = 0
        self._header = [b"", b""]
        self._headers: dict[bytes, bytes] = {}
        self._data: list[bytes] = []

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._extend(0, data[start:end]),
            "on_header_value": lambda data, start, end: self._extend(1, data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._data.append(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields")
        self._headers, self._data = {}, []

    def _extend(self, which: int, piece: bytes) -> None:
        self._header[which] += piece

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _end(self) -> None:
        _, told = parse_options_header(self._headers.get(b"content-disposition"))
        name, data = told.get(b"name", b"").decode("utf-8", "replace"), b"".join(self._data)
        if name == "file":
            kind, _ = parse_options_header(self._headers.get(b"content-type"))
            filename = told.get(b"filename", b"").decode("utf-8", "replace")
            self.file = FormFile(filename, kind.decode("latin-1"), data)
        else:
            self.fields[name] = data.decode("utf-8", "replace")

    def _complete(self) -> None:
        self.is_complete = True


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


def sent_paths(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The form's field of each path of the chat request, for its errors."""
    paths = {}
    for at, message in enumerate(messages):
        content = f"messages[{at}].content"
        paths[content] = "language" if message["role"] == "assistant" else "prompt"
        if message["role"] == "user":
            audio = [part["type"] for part in message["content"]].index("input_audio")
            paths[f"{content}[{audio}]"] = "file"
            paths[f"{content}[{audio}].input_audio"] = "file"
            paths |= {f"{content}[{i}].text": "prompt" for i in range(len(message["content"]))}
    return paths
