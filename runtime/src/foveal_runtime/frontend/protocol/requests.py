"""The requests of the OpenAI API as this server takes them: types, ranges, descriptions.

Parsed by FastAPI, read by chat.py and completions.py. An option that would change the output and is
not served is refused by name (rules.py); one without meaning here is accepted and listed there.
What may stand inside messages is in messages.py.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    WrapValidator,
    model_validator,
)

from foveal_runtime.frontend.protocol.bounds import (
    Bounded,
    Lenient,
    Open,
    check_ids,
    check_num_fields,
    check_num_parts,
    check_plain,
    check_tools,
)
from foveal_runtime.frontend.protocol.messages import Message, Text

MAX_CHOICES = 64
"""Sequences of one HTTP request at most (prompts × n)."""
MAX_LOGPROBS = 20
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_REGEX_CHARS = 8 * 1024
MAX_GRAMMAR_CHARS = 64 * 1024
MAX_TOOLS = 1024
MAX_SCHEMA_DEPTH = 100
MAX_SCHEMA_PARTS = 50_000

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=128)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


def _number(value: Any) -> Any:
    """Some clients write numbers as strings and whole numbers as 5.0."""
    if isinstance(value, str) and len(value) <= 32 and _NUMBER.fullmatch(value):
        value = float(value) if _FRACTION.search(value) else int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?")
_FRACTION = re.compile(r"[.eE]")
Integer = Annotated[int, BeforeValidator(_number)]
Float = Annotated[float, BeforeValidator(_number)]


def _not_zero(value: int) -> int:
    if not value:
        raise ValueError("must be -1 or at least 1: a prompt of no tokens cannot be computed")
    return value


NumKept = Annotated[Integer, Field(ge=-1, lt=2**31), AfterValidator(_not_zero)]
Budget = Annotated[
    Integer,
    Field(ge=-1, lt=2**31),
    AfterValidator(lambda value: None if value == -1 else value),
]
FreeForm = Annotated[dict[str, Any], BeforeValidator(check_plain)]
"""JSON whose fields this server does not know: the model's template or processor does."""
LogitBias = Annotated[
    dict[str, Float], BeforeValidator(partial(check_num_fields, limit=MAX_BIASES))
]


class _Strict(Bounded):
    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """null is as absent, also of a field that this server does not know."""
        if not isinstance(value, dict):
            return value
        return {name: part for name, part in value.items() if part is not None}


class StreamOptions(Bounded):
    """Unknown keys (`include_obfuscation`) are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    include_usage: bool | None = Field(None, description="a last chunk with the usage")
    continuous_usage_stats: bool | None = Field(None, description="usage in every chunk")
    include_cache_usage: bool | None = Field(
        None, description="`usage.cache` in the last chunk: what each cache saved"
    )


Schema = Annotated[
    dict[str, Any] | bool | str,
    BeforeValidator(partial(check_plain, max_depth=MAX_SCHEMA_DEPTH, max_nodes=MAX_SCHEMA_PARTS)),
]


Tags = Annotated[
    list[Any],
    BeforeValidator(partial(check_plain, max_depth=MAX_SCHEMA_DEPTH, max_nodes=MAX_SCHEMA_PARTS)),
]


class JsonSchema(Bounded):
    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    name: str | None = None
    body: Schema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="everything is enforced, or refused")


class ResponseFormat(Bounded):
    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    body: Schema | None = Field(None, alias="schema", description="of json_object, as llama.cpp's")
    structures: Tags | None = Field(None, description="of a structural tag")
    triggers: list[str] | None = Field(None, description="of a structural tag")
    format: Schema | None = Field(None, description="of a structural tag")


class StructuredOutputs(_Strict):
    """Exactly one of the first six."""

    body: Schema | None = Field(
        None, alias="json", description="a JSON schema, as an object or as text"
    )
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: Annotated[list[StopString], Field(min_length=1, max_length=1024)] | None = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)] | None = Field(
        None, description="Lark, or EBNF with ::="
    )
    structural_tag: Schema | None = None
    disable_any_whitespace: bool | None = Field(None, description="accepted, without effect")
    disable_fallback: bool | None = Field(None, description="accepted, without effect")
    disable_additional_properties: bool | None = Field(None, description="not served")
    whitespace_pattern: str | None = Field(None, description="not served")


class _Sampling(Open):
    """Options that chat and text completions share."""

    model: str | None = Field(None, max_length=1024, description="the served model's name")
    temperature: Float | None = Field(None, ge=0, le=100, description="0: greedy")
    top_p: Float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: Float | None = Field(None, ge=0, le=1)
    seed: Integer | None = Field(
        None, ge=-(2**63), lt=2**64, description="same seed, same tokens; -1: none"
    )
    repetition_penalty: Float | None = Field(None, gt=0, le=100)
    presence_penalty: Float | None = Field(None, ge=-2, le=2)
    frequency_penalty: Float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(
        None, description="token id (as a string) to bias, -100 to 100"
    )
    stop: StopString | Annotated[list[StopString], Field(max_length=16, fail_fast=True)] | None = (
        Field(None, description="strings that end the text and are not part of it")
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Integer | None = Field(None, ge=0, lt=2**31)
    max_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = Field(None, description="default true")
    n: Integer | None = Field(None, ge=1, le=MAX_CHOICES, description="choices per prompt")
    best_of: Integer | None = Field(None, ge=1, le=MAX_CHOICES, description="only equal to n")
    prompt_logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = Field(None, description="token ids beside the text")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="smaller first, under the priority policy"
    )
    cache_salt: CacheSalt | None = Field(
        None, description="separates caches; no '@', '/', '\\' or NUL"
    )
    mm_processor_kwargs: FreeForm | None = Field(
        None, description="options of the model's image, video and audio processors"
    )
    add_special_tokens: bool | None = Field(None, description="chat: false, text: true")
    response_format: ResponseFormat | None = Field(None, description="JSON, by a schema or not")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="what the output must follow"
    )
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=65536, fail_fast=True)] | None
    ) = Field(None, description="no other token is chosen, the end token included")
    bad_words: Annotated[list[StopString], Field(max_length=256, fail_fast=True)] | None = Field(
        None, description="words that are not completed"
    )
    logprob_token_ids: (
        Annotated[list[TokenId], Field(max_length=MAX_LOGPROBS, fail_fast=True)] | None
    ) = Field(None, description="with logprobs: of these tokens, not of the most likely")
    return_tokens_as_token_ids: bool | None = Field(
        None, description='tokens of logprobs as "token_id:N"'
    )
    truncate_prompt_tokens: NumKept | None = Field(
        None, description="keep only the last tokens of a prompt without media; -1: what fits"
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="of truncate_prompt_tokens; right: keep the first tokens instead"
    )


Messages = Annotated[
    list[Message],
    Field(min_length=1, max_length=8192, fail_fast=True),
    BeforeValidator(check_num_parts),
]


ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]


class ToolFunction(Lenient):
    name: ToolName
    description: Text | None = None
    parameters: Schema | None = Field(None, description="a JSON schema of an object; absent: none")
    strict: bool | None = Field(None, description="the schema is enforced whole, or refused")


class Tool(Lenient):
    type: Literal["function"]
    function: ToolFunction


Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), BeforeValidator(check_tools)
]


class _Named(Lenient):
    name: ToolName


class NamedTool(Lenient):
    type: Literal["function"]
    function: _Named


class _AllowedTools(Lenient):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Lenient):
    type: Literal["allowed_tools"]
    allowed_tools: _AllowedTools


class ChatCompletionRequest(_Sampling):
    messages: Messages
    max_completion_tokens: Integer | None = Field(None, ge=1, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_generation_prompt: bool | None = Field(None, description="default true")
    continue_final_message: bool | None = Field(
        None, description="the answer continues the last message"
    )
    chat_template_kwargs: FreeForm | None = Field(
        None, description="extra variables for the model's chat template"
    )
    tools: Tools | None = Field(None, description="functions that the model may call")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = Field(
        None, description="whether it must; default auto"
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="for models that reason; none: they do not")
    )
    thinking_token_budget: Budget | None = Field(
        None, description="tokens of reasoning at most; -1: no limit"
    )
    include_reasoning: bool | None = Field(None, description="false: it is not part of the answer")


TokenIds = Annotated[
    list[TokenId],
    Field(min_length=1, max_length=16_000_000, fail_fast=True),
    WrapValidator(check_ids),
]
MAX_INPUTS = 2048


def _few(value: Any, limit: int, name: str) -> Any:
    """Before the types are looked at, of which the first would be blamed."""
    if isinstance(value, list) and len(value) > limit and not isinstance(value[0], int):
        raise ValueError(f"{len(value)} {name}; at most {limit} are taken")
    return value


Prompt = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    BeforeValidator(partial(_few, limit=MAX_CHOICES, name="prompts")),
]


class CompletionRequest(_Sampling):
    prompt: Prompt = Field(description="text, token ids, or a list of either")
    logprobs: Integer | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_tokens: Integer | None = Field(
        None, ge=0, lt=2**31, description="default 16; 0 only with echo: score the prompt"
    )
    echo: bool | None = Field(None, description="the prompt stands before the text")
    suffix: str | None = Field(None, description="not served")


Inputs = Annotated[
    Text
    | TokenIds
    | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
    | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)],
    BeforeValidator(partial(_few, limit=MAX_INPUTS, name="inputs")),
]


class EmbeddingRequest(Open):
    """`input`, or `messages` as in chat."""

    model: str | None = Field(None, max_length=1024, description="the served model's name")
    input: Inputs | None = Field(None, description="text, token ids, or a list of either")
    messages: Messages | None = Field(
        None, description="one conversation to embed, with images, video and audio"
    )
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="default float; base64: of little-endian 32-bit floats"
    )
    dimensions: Integer | None = Field(
        None, ge=1, lt=2**31, description="only the first so many, for models trained for it"
    )
    normalize: bool | None = Field(
        None,
        validation_alias=AliasChoices("normalize", "use_activation"),
        description="unit length; default: as the checkpoint's modules.json says, else true",
    )
    truncate_prompt_tokens: NumKept | None = Field(
        None, description="keep only the first tokens of inputs without media; -1: what fits"
    )
    truncation_side: Literal["right"] | None = Field(None, description="the only one")
    add_special_tokens: bool | None = Field(None, description="messages: false, input: true")
    add_generation_prompt: bool | None = Field(None, description="default false")
    continue_final_message: bool | None = None
    chat_template_kwargs: FreeForm | None = None
    mm_processor_kwargs: FreeForm | None = None
    priority: Integer | None = Field(
        None, ge=-(2**31), lt=2**31, description="smaller first, under the priority policy"
    )
    cache_salt: CacheSalt | None = Field(
        None, description="separates caches; no '@', '/', '\\' or NUL"
    )


class TokenizeRequest(_Strict):
    """`prompt`, or `messages` as in chat."""

    model: str | None = Field(None, max_length=1024)
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: FreeForm | None = None
    tools: Tools | None = None
    return_token_strs: bool | None = None
    expand_media: bool | None = Field(None, description="false: a medium counts as one token")
    mm_processor_kwargs: FreeForm | None = None
    cache_salt: CacheSalt | None = Field(
        None, description="separates caches of media; no '@', '/', '\\' or NUL"
    )


class DetokenizeRequest(_Strict):
    model: str | None = Field(None, max_length=1024)
    tokens: Annotated[
        list[TokenId], Field(max_length=16_000_000, fail_fast=True), WrapValidator(check_ids)
    ]
