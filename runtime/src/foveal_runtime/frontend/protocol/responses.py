"""The answers of the OpenAI API, as documentation: what /docs shows and what tests check against.

The hot path writes plain dicts (http/answers.py); these models never touch a request.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field

from foveal_runtime.plan.media import Modality

FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorInfo(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str


class ErrorResponse(BaseModel):
    error: ErrorInfo


class PromptTokensDetails(BaseModel):
    cached_tokens: int = Field(description="prompt tokens found in the prefix cache")


class ReasoningDetails(BaseModel):
    reasoning_tokens: int


class ItemUsage(BaseModel):
    modality: Modality
    bytes: int = Field(description="of the processed item")
    processed: bool = Field(
        description="the processor ran; false: processor cache or engine had it"
    )
    sent: bool = Field(description="its value was sent to the engine; false: the engine had it")


class CacheUsage(BaseModel):
    items: list[ItemUsage]
    encoder_hits: int = Field(description="items whose encoder output was reused")
    encoded: int = Field(description="items encoded now; the rest is in the prefix cache")
    queue_seconds: float
    prefill_seconds: float


class Usage(BaseModel):
    prompt_tokens: int = Field(description="the expanded prompt: media count as their tokens")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: ReasoningDetails | None = None
    cache: CacheUsage | None = Field(None, description="with stream_options.include_cache_usage")


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]


class Function(BaseModel):
    name: str | None = None
    arguments: str = Field(description="JSON text; in a stream, the next part of it")


class Call(BaseModel):
    index: int | None = Field(None, description="in a stream: which call the part belongs to")
    id: str | None = None
    type: Literal["function"] | None = None
    function: Function


class ChatMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = Field(None, description="what the model thought before it answered")
    reasoning_content: str | None = Field(None, description="the same by another name")


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = Field(None, description="the stop token id or string")
    token_ids: list[int] | None = None


PromptLogprobs = list[dict[str, dict[str, float | int | str]] | None]


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[Call] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One `data:` line of a stream; after the last one comes `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None = None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int = Field(description="media count as their tokens")
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class MediaLimits(BaseModel):
    max_per_prompt: int
    max_bytes: int
    max_pixels: int | None = Field(None, description="of an image or a frame")
    max_seconds: float | None = Field(None, description="of a video or an audio clip")
    max_pages: int | None = Field(None, description="of a document, whose pages are images")


class ModelCard(BaseModel):
    """With what OpenAI's clients read of a model, and what Anthropic's do."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    display_name: str = Field(description="the same as `id`")
    created: int
    created_at: datetime = Field(description="the same as `created`")
    owned_by: str = "foveal"
    root: str
    parent: str | None = Field(None, description="of a LoRA adapter: the model that it belongs to")
    max_model_len: int
    modalities: dict[Modality, MediaLimits] = Field(description="media that the model takes")


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
    first_id: str
    last_id: str
    has_more: Literal[False] = False


class TokenizeResponse(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    tokenizer_class: str
    vocab_size: int
    max_model_len: int
    chat_template: str | None
    special_tokens: dict[str, str]
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None


class LoadResponse(BaseModel):
    server_load: int = Field(description="requests that this process serves now")
    num_running: int = Field(description="requests running on engines")
    num_waiting: int = Field(description="requests waiting in engines")
    kv_usage: float = Field(description="share of the KV cache in use, of the fullest engine")


class DetokenizeResponse(BaseModel):
    prompt: str


class VersionResponse(BaseModel):
    version: str


class HealthResponse(BaseModel):
    status: str
    detail: str = ""
