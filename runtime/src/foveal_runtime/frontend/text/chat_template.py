"""Messages to the model's prompt: the checkpoint's own chat template, media as placeholders.

Called by chat.py and the tokenize endpoint. Text that spells a placeholder is refused: a user's
words never become an item. Never looks at the media themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from foveal_runtime.frontend.grammars.formats import FORMATS, render_calls
from foveal_runtime.frontend.items.interfaces import PromptPlaceholders
from foveal_runtime.frontend.items.prepared import MediaPart
from foveal_runtime.frontend.items.source import Page
from foveal_runtime.frontend.protocol.messages import (
    ContentPart,
    DocumentPart,
    Message,
    RefusalPart,
    TextPart,
    ToolCall,
    check_num_roles,
    check_variables,
)
from foveal_runtime.frontend.text.call_history import fit_calls
from foveal_runtime.frontend.text.parts import join_messages, joined, media_part, said_by_user
from foveal_runtime.frontend.text.probed_template import TEMPLATE_ERRORS, ProbedTemplate
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from foveal_runtime.plan.media import MODALITIES, Modality


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered prompt and the media it mentions, in prompt order as far as templates keep it."""

    text: str
    parts: list[MediaPart] = field(default_factory=list)


class ChatTemplate:
    """One checkpoint's template.

    Attributes:
        source: the template's text; None where the checkpoint has none.
        tool_format, thinking: as in ProbedTemplate.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str | None,
        processor: PromptPlaceholders,
        tool_format: str = "",
        tool_template: str | None = None,
    ) -> None:
        """`tool_template`: the checkpoint's template for requests with tools, if it has one."""
        self._tokenizer = tokenizer
        self._processor = processor
        self._placeholders = self._spellings()
        self.source = template
        self.probed = ProbedTemplate(tokenizer, template, tool_format)
        self.tool_format, self.thinking = self.probed.tool_format, self.probed.thinking
        self._for_tools: ChatTemplate | None = None
        if tool_template is not None:
            self._for_tools = ChatTemplate(tokenizer, tool_template, processor, tool_format)
            self.tool_format = self._for_tools.tool_format

    def _spellings(self) -> dict[Modality, str]:
        found: dict[Modality, str] = {}
        for modality in MODALITIES:
            token_id = self._processor.placeholder_token_id(modality)
            if token_id is not None:
                found[modality] = self._tokenizer.token(token_id) or ""
        return {modality: text for modality, text in found.items() if text}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        pages: Mapping[str, Sequence[Page]] | None = None,
    ) -> Conversation:
        """`pages` are those of each of `documents_of`. Raises InvalidRequest when the
        template refuses the messages (roles out of order), when a text spells a placeholder, or
        when a part cannot be what it says it is."""
        if tools and self._for_tools is not None:
            return self._for_tools.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=variables,
                tools=tools,
                pages=pages,
            )
        if self.source is None:
            raise Unsupported(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        check_variables(variables or {}, messages, continue_final_message)
        check_num_roles(messages)
        parts: list[MediaPart] = []
        order = self._order(messages)
        plain = join_messages(
            messages,
            order,
            [self._plain(messages[at], f"messages[{at}]", parts, pages or {}) for at in order],
            one_system=not self.probed.takes_later_systems,
        )
        if any("tool_calls" in one for one in plain):
            plain = fit_calls(plain, self.probed.call_rules)
        told: dict[str, Any] = {}
        if tools:
            self._check_text(json.dumps(tools, ensure_ascii=False), "tools")
            if self.probed.takes_tools:
                told["tools"] = tools
            else:
                self._tell_tools(plain, tools)
        if plain and plain[0]["role"] == "system" and not self.probed.takes_systems:
            plain = said_by_user(plain)
        try:
            text = self.probed.apply(
                plain,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **told,
                **(variables or {}),
            )
        except TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from error
        return Conversation(text, parts)

    def _order(self, messages: Sequence[Message]) -> Sequence[int]:
        """System messages first, for templates that take them nowhere else; media follow, since
        the prompt has them in this order."""
        order = range(len(messages))
        if self.probed.takes_later_systems:
            return order
        roles = [self.probed.role(one.role, f"messages[{at}]") for at, one in enumerate(messages)]
        return sorted(order, key=lambda at: roles[at] != "system")

    def _tell_tools(self, plain: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
        """For templates without tools: the system message says what they would."""
        row = self.tool_format or FORMATS["json"]
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        example = render_calls(row, [("name_of_function", {"argument": "value"})], {})
        text = (
            f"You can call functions. One line describes each:\n{lines}\nTo call functions, answer "
            f"with nothing but calls in this form:\n{example}"
        )
        if plain[0]["role"] != "system":
            content: Any = [] if self.probed.takes_parts("system") else ""
            plain.insert(0, {"role": "system", "content": content})
        first = plain[0]
        if isinstance(first["content"], list):
            first["content"] = [*first["content"], {"type": "text", "text": text}]
        else:
            first["content"] = f"{first['content']}\n\n{text}".strip()

    def _plain(
        self,
        message: Message,
        path: str,
        parts: list[MediaPart],
        pages: Mapping[str, Sequence[Page]],
    ) -> dict[str, Any]:
        plain: dict[str, Any] = {"role": self.probed.role(message.role, path)}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                self._check_text(value, f"{path}.{name}")
                plain[name] = value
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            self._check_text(reasoning, f"{path}.reasoning_content")
            plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if message.content is None and message.role not in ("assistant", "tool"):
            raise InvalidRequest(f"{path}.content is missing", param=f"{path}.content")
        content: str | Sequence[ContentPart] = message.content if message.content else ""
        if message.tool_calls:
            calls = self._plain_calls(message.tool_calls, f"{path}.tool_calls")
            if "tool_calls" in (self.source or ""):
                plain["tool_calls"] = calls
            else:
                content = self._with_calls(content, calls)
        has_calls = "tool_calls" in plain and plain["role"] != "system"
        as_parts = self.probed.takes_parts(plain["role"], has_calls)
        if isinstance(content, str):
            self._check_text(content, f"{path}.content")
            content_out: Any = content
            if as_parts:
                content_out = [{"type": "text", "text": content}]
        else:
            found, text = self._plain_parts(content, f"{path}.content", parts, pages)
            content_out = found if as_parts else text
        if reasoning and self.probed.takes_thinking_parts:
            said = content_out if as_parts else [{"type": "text", "text": content_out}]
            content_out = [{"type": "thinking", "thinking": reasoning}, *said]
        elif reasoning and has_calls and content and not self.probed.takes_thought_and_text:
            before = [{"type": "text", "text": reasoning}] if as_parts else reasoning
            content_out = joined(before, content_out, "\n\n")
            del plain["reasoning_content"], plain["reasoning"]
        plain["content"] = content_out
        return plain

    def _plain_calls(self, calls: Sequence[ToolCall], path: str) -> list[dict[str, Any]]:
        """Arguments as the object that they spell, which templates write out; else as they are."""
        plain = []
        for index, call in enumerate(calls):
            function = call.function
            arguments: Any = function.arguments or {}
            if isinstance(arguments, str):
                self._check_text(arguments, f"{path}[{index}].function.arguments")
                try:
                    found = msgspec.json.decode(arguments) if arguments.strip() else {}
                    arguments = found if isinstance(found, dict) else arguments
                except (msgspec.DecodeError, RecursionError):
                    pass  # no JSON, or half a surrogate pair, which no tokenizer takes
                if isinstance(arguments, str) and not self.probed.takes_odd_arguments:
                    arguments = {}
            if self.probed.arguments_as_text and isinstance(arguments, dict):
                arguments = json.dumps(arguments, ensure_ascii=False)
            named = {"name": function.name, "arguments": arguments}
            plain.append({"id": call.id or f"call_{index}", "type": "function", "function": named})
        return plain

    def _with_calls(
        self, content: str | Sequence[ContentPart], calls: Sequence[dict[str, Any]]
    ) -> str | list[ContentPart]:
        """For templates without tool calls: as the model writes them, after the text."""
        row = self.tool_format or FORMATS["json"]
        named = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        text = render_calls(row, named, {})
        if isinstance(content, str):
            return f"{content}\n{text}" if content else text
        return [*content, TextPart(type="text", text=text)]

    def _plain_parts(
        self,
        content: Sequence[ContentPart],
        path: str,
        parts: list[MediaPart],
        pages: Mapping[str, Sequence[Page]],
    ) -> tuple[list[dict[str, str]], str]:
        """The content as parts, and as one text."""
        structured: list[dict[str, str]] = []
        joined: list[str] = []
        for index, part in enumerate(content):
            where = f"{path}[{index}]"
            if isinstance(part, TextPart | RefusalPart):
                text = part.text if isinstance(part, TextPart) else part.refusal
                self._check_text(text, f"{where}.text")
                structured.append({"type": "text", "text": text})
                joined.append(text)
                continue
            if isinstance(part, DocumentPart):
                media = [MediaPart(modality="image", path=where, page=p) for p in pages[where]]
            else:
                media = [media_part(part, where)]
            for one in media:
                if one.modality not in self._placeholders:
                    raise Unsupported(f"this model takes no {one.modality} input", param=where)
                parts.append(one)
                structured.append({"type": one.modality})
                joined.append(self._processor.placeholder_text(one.modality) or "")
        return structured, "\n".join(joined)

    def _check_text(self, text: str, path: str) -> None:
        for modality, spelling in self._placeholders.items():
            if spelling in text:
                raise InvalidRequest(
                    f"{path} contains {spelling!r}, which stands for {modality} input in this "
                    f"model's prompts; remove it, or send the {modality} as a content part",
                    param=path,
                )

    def encode(
        self, conversation: Conversation, *, add_special_tokens: bool, limit: int = 0
    ) -> list[int]:
        """Token ids with exactly one placeholder per part.

        Raises InvalidRequest when the template dropped a part, repeated it, or text that was
        split over parts became a placeholder, ContextLengthExceeded beyond `limit` tokens.
        """
        try:
            token_ids = self._tokenizer.encode(
                conversation.text, add_special_tokens=add_special_tokens, limit=limit
            )
        except ContextLengthExceeded as error:
            raise error.about("messages", error.message) from None
        for modality in self._placeholders:
            token_id = self._processor.placeholder_token_id(modality)
            num_parts = sum(1 for part in conversation.parts if part.modality == modality)
            num_found = token_ids.count(token_id) if token_id is not None else 0
            if num_found != num_parts:
                raise InvalidRequest(
                    f"{num_parts} {modality} parts became {num_found} placeholders in the prompt: "
                    "the model's chat template does not take media where the messages have them, "
                    "or text spells a placeholder",
                    param="messages",
                )
        return token_ids
