"""Messages of a conversation and their content parts, as clients of many makes write them.

Read by the chat template. Lenient: what a server may have answered is accepted back, and a key
that is not known is dropped, because it cannot change the prompt. A part of an unknown *type* is
refused: it is content that the model would not see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foveal_runtime.frontend.protocol.body_text import MaybeInBody, MediaText
from foveal_runtime.frontend.protocol.bounds import Lenient, check_plain
from foveal_runtime.plan.errors import InvalidRequest

Text = Annotated[str, Field(max_length=16_000_000)]
MAX_TOOL_CALLS = 1024
MAX_ROLES = 16
"""Of one conversation: each that is new takes renderings of the template, which hold others up."""
_RESERVED_KWARGS = frozenset(
    {
        "messages", "conversation", "tools", "documents", "tokenize", "add_generation_prompt",
        "continue_final_message", "chat_template", "return_dict", "return_tensors", "padding",
        "truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs",
        "bos_token", "eos_token", "pad_token", "unk_token",
    }
)  # fmt: skip


Uuid = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=4096,
        description="Your name for the content. Sent with content it binds; sent alone it reuses.",
    ),
]


def _as_object(value: Any) -> Any:
    """A URL where an object with `url` is expected."""
    return {"url": value} if isinstance(value, str) else value


class MediaUrl(Lenient):
    url: Annotated[MediaText, MaybeInBody()] | None = Field(
        None, description="http(s): or data: URL"
    )


MediaAddress = Annotated[MediaUrl, BeforeValidator(_as_object)]


class InputAudio(Lenient):
    data: str = Field(description="base64 of the encoded file")
    format: str = Field(pattern=r"^[a-z0-9.+-]{1,32}$", description="wav, mp3, flac, ogg, ...")


class TextPart(Lenient):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class RefusalPart(Lenient):
    """An earlier answer's refusal; read as its text."""

    type: Literal["refusal"]
    refusal: Text


class ImagePart(Lenient):
    type: Literal["image_url", "input_image"]
    image_url: MediaAddress | None = Field(
        None, description="a URL or {url}; absent, null or empty: `uuid` names the image"
    )
    uuid: Uuid = None


class ImageEmbedsPart(Lenient):
    """An image as the outputs of the model's own encoder."""

    type: Literal["image_embeds"]
    image_embeds: str | None = Field(
        None, description="base64 of a safetensors file; absent or null: `uuid` names the image"
    )
    uuid: Uuid = None


class VideoPart(Lenient):
    type: Literal["video_url"]
    video_url: MediaAddress | None = Field(
        None, description="a URL or {url}; absent, null or empty: `uuid` names the video"
    )
    uuid: Uuid = None


class AudioUrlPart(Lenient):
    type: Literal["audio_url"]
    audio_url: MediaAddress | None = Field(
        None, description="a URL or {url}; absent, null or empty: `uuid` names the audio"
    )
    uuid: Uuid = None


class InputAudioPart(Lenient):
    type: Literal["input_audio"]
    input_audio: InputAudio | None = Field(None, description="absent or null: `uuid` names it")
    uuid: Uuid = None


class FileContent(Lenient):
    file_data: str | None = Field(
        None, description="a PDF: a data: URL, its bare base64, or an http(s): URL"
    )
    file_url: str | None = Field(None, description="http(s): or data: URL of a PDF")
    file_id: str | None = Field(None, description="not served: this server keeps no files")


class FilePart(Lenient):
    """A document; each of its pages becomes an image."""

    type: Literal["file"]
    file: FileContent


class InputFilePart(FileContent):
    """The same as the Responses API writes it."""

    type: Literal["input_file"]


DocumentPart = FilePart | InputFilePart
MediaContent = ImagePart | ImageEmbedsPart | VideoPart | AudioUrlPart | InputAudioPart
ContentPart = Annotated[
    TextPart
    | RefusalPart
    | ImagePart
    | ImageEmbedsPart
    | VideoPart
    | AudioUrlPart
    | InputAudioPart
    | FilePart
    | InputFilePart,
    Field(discriminator="type"),
]


Arguments = Annotated[dict[str, Any], BeforeValidator(check_plain)]


class CalledFunction(Lenient):
    name: str = Field(max_length=256)
    arguments: Text | Arguments | None = Field(None, description="JSON text; none: {}")


class ToolCall(Lenient):
    """A call that an earlier answer made."""

    id: str | None = Field(None, max_length=256)
    function: CalledFunction


class Message(Lenient):
    role: str = Field(
        pattern=r"^[A-Za-z0-9_.-]{1,64}$",
        description="system, developer, user, assistant, tool, or a role of the chat template",
    )
    content: Text | Annotated[list[ContentPart], Field(max_length=4096, fail_fast=True)] | None = (
        Field(None, description="text, or parts")
    )
    name: str | None = Field(None, max_length=256, description="handed to the chat template")
    tool_calls: (
        Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = Field(None, description="calls of an earlier answer")
    tool_call_id: str | None = Field(None, max_length=256, description="which call this answers")
    reasoning_content: Text | None = Field(None, description="an earlier answer's reasoning")
    reasoning: Text | None = Field(None, description="the same by another name")


def check_num_roles(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest."""
    roles: set[str] = set()
    for index, message in enumerate(messages):
        roles.add(message.role)
        if len(roles) > MAX_ROLES:
            raise InvalidRequest(
                f"messages[{index}].role is {message.role!r}, one role more than the {MAX_ROLES} "
                "that a request may have; use 'system', 'user', 'assistant' or 'tool'",
                param=f"messages[{index}].role",
            )


def check_variables(
    variables: Mapping[str, Any], messages: Sequence[Message], continues: bool
) -> None:
    """Raises InvalidRequest."""
    for name in variables:
        if name in _RESERVED_KWARGS:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}",
                param=f"chat_template_kwargs.{name}",
            )
    if continues and messages[-1].role != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of role assistant",
            param="continue_final_message",
        )
