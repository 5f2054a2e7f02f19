"""The requests of the OpenAI API as this server takes them: types, ranges, descriptions.

Parsed by FastAPI, read by chat.py and completions.py. A field that would change the output and is
not served is refused by name (request_rules.py); a field without meaning here is accepted and
listed there. Strict types: "5" is not a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_CHOICES = 64
"""Sequences of one HTTP request at most (prompts × n)."""
MAX_LOGPROBS = 20
MAX_STOP_CHARS = 256

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Text = Annotated[str, Field(max_length=16_000_000)]


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


class _Open(BaseModel):
    """Unknown fields are kept, for request_rules.py to judge."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, hide_input_in_errors=True
    )


Uuid = Annotated[
    str | None,
    Field(
        min_length=1,
        max_length=4096,
        description="Your name for the content. Sent with content it binds; sent alone it reuses.",
    ),
]


class ImageUrl(_Strict):
    url: str = Field(description="http(s): or data: URL")
    detail: str | None = Field(None, description="accepted, without effect")


class MediaUrl(_Strict):
    url: str = Field(description="http(s): or data: URL")


class InputAudio(_Strict):
    data: str = Field(description="base64 of the encoded file")
    format: str = Field(pattern=r"^[a-z0-9.+-]{1,32}$", description="wav, mp3, flac, ogg, ...")


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


class ImagePart(_Strict):
    type: Literal["image_url"]
    image_url: ImageUrl | None = Field(None, description="absent or null: `uuid` names the image")
    uuid: Uuid = None


class VideoPart(_Strict):
    type: Literal["video_url"]
    video_url: MediaUrl | None = Field(None, description="absent or null: `uuid` names the video")
    uuid: Uuid = None


class AudioUrlPart(_Strict):
    type: Literal["audio_url"]
    audio_url: MediaUrl | None = Field(None, description="absent or null: `uuid` names the audio")
    uuid: Uuid = None


class InputAudioPart(_Strict):
    type: Literal["input_audio"]
    input_audio: InputAudio | None = Field(None, description="absent or null: `uuid` names it")
    uuid: Uuid = None


ContentPart = Annotated[
    TextPart | ImagePart | VideoPart | AudioUrlPart | InputAudioPart, Field(discriminator="type")
]


class Message(_Open):
    role: Literal["system", "developer", "user", "assistant"] = Field(
        description="`developer` is written as `system`"
    )
    content: Text | Annotated[list[ContentPart], Field(max_length=4096)] | None = Field(
        None, description="text, or parts"
    )
    name: str | None = Field(None, max_length=256, description="handed to the chat template")


class StreamOptions(_Strict):
    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage in every chunk")


class _Sampling(_Open):
    """Options that chat and text completions share."""

    model: str | None = Field(None, max_length=1024, description="the served model's name")
    temperature: float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="same seed, same tokens")
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], Field(max_length=1024)] | None = Field(
        None, description="token id (as a string) to bias, -100 to 100"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = Field(
        None, description="strings that end the text and are not part of it"
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=1, lt=2**31)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="default true")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="choices per prompt")
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES, description="only equal to n")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = Field(None, description="token ids beside the text")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = Field(
        None, ge=-(2**31), lt=2**31, description="smaller first, under the priority policy"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = Field(
        None, description="separates caches; no '@', '/', '\\' or NUL"
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="options of the model's image, video and audio processors"
    )
    add_special_tokens: bool | None = Field(None, description="chat: false, text: true")


class ChatCompletionRequest(_Sampling):
    messages: Annotated[list[Message], Field(min_length=1, max_length=8192)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(
        None, description="the answer continues the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="extra variables for the model's chat template"
    )


Prompt = (
    Text
    | Annotated[list[TokenId], Field(min_length=1, max_length=16_000_000)]
    | Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES)]
    | Annotated[
        list[Annotated[list[TokenId], Field(min_length=1, max_length=16_000_000)]],
        Field(min_length=1, max_length=MAX_CHOICES),
    ]
)


class CompletionRequest(_Sampling):
    prompt: Prompt = Field(description="text, token ids, or a list of either")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="default 16; 0 only with echo: score the prompt"
    )
    echo: bool | None = Field(None, description="the prompt stands before the text")
    suffix: str | None = Field(None, description="not served")


class TokenizeRequest(_Strict):
    """`prompt`, or `messages` as in chat."""

    model: str | None = Field(None, max_length=1024)
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=8192)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Strict):
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[list[TokenId], Field(max_length=16_000_000)]
