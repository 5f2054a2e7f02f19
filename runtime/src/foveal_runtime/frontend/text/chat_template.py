"""Messages to the model's prompt: the checkpoint's own chat template, media as placeholders.

Called by chat.py and the tokenize endpoint. Text that spells a placeholder is refused: a user's
words never become an item. Never looks at the media themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import jinja2
import msgspec

from foveal_runtime.frontend.grammars.formats import (
    FORMATS,
    THINKING,
    UNTOLD,
    Format,
    recognise,
    render_calls,
)
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
from foveal_runtime.frontend.text.parts import join_messages, media_part
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest, Unsupported
from foveal_runtime.plan.media import MODALITIES, Modality

_PROBE = "fovealprobe"
_LISTED = re.compile(f"['\"]text['\"]\\s*:\\s*['\"]{_PROBE}")
"""The probe's list of parts, written out as one."""
_MAX_PROBED_ROLES = 64
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered prompt and the media it mentions, in prompt order as far as templates keep it."""

    text: str
    parts: list[MediaPart] = field(default_factory=list)


class ChatTemplate:
    """One checkpoint's template.

    Attributes:
        source: the template's text; None where the checkpoint has none.
        content_format: "parts" when the template reads lists of content parts, else "string" (the
            parts are joined by newlines and media stand there as the processor's placeholder text).
        tool_format: how the model writes tool calls; None when the template writes them in a way
            that is not known.
        thinking: the markers around reasoning; None for a template that names none.
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
        self.source = template
        self._processor = processor
        self._placeholders = self._spellings()
        self.content_format = "string" if template is None else self._detect()
        self._roles: dict[str, bool] = {"system": True, "user": True, "assistant": True}
        self._parts_of: dict[tuple[str, bool], bool] = {}
        self._arguments_as_text = False
        self._takes_tools = template is not None and self._probe_tools()
        self._takes_later_systems = template is not None and self._probe_later_systems()
        self._for_tools = (
            ChatTemplate(tokenizer, tool_template, processor, tool_format)
            if tool_template is not None
            else None
        )
        self.tool_format = (
            FORMATS[tool_format] if tool_format else (self._for_tools or self)._probe_calls()
        )
        self.thinking = next((pair for pair in THINKING if pair[1] in (template or "")), None)

    def _spellings(self) -> dict[Modality, str]:
        found: dict[Modality, str] = {}
        for modality in MODALITIES:
            token_id = self._processor.placeholder_token_id(modality)
            if token_id is not None:
                found[modality] = self._tokenizer.token(token_id) or ""
        return {modality: text for modality, text in found.items() if text}

    def _detect(self) -> str:
        """Asks the template itself: content parts come out as their text, or they do not."""
        try:
            out = self._apply([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        except (jinja2.TemplateError, TypeError, ValueError):
            return "string"
        return "parts" if _PROBE in out and not _LISTED.search(out) else "string"

    def _takes_parts(self, role: str, has_calls: bool = False) -> bool:
        """Whether messages of a role come as parts: some templates read the user's parts and write
        those of others out as Python's lists."""
        if self.content_format == "string" or role == "user":
            return self.content_format == "parts"
        known = self._parts_of.get((role, has_calls))
        if known is None:
            known = self._probe_parts(role, has_calls)
            if role in self._roles or role == "tool":  # of which there are not many
                self._parts_of[role, has_calls] = known
        return known

    def _probe_parts(self, role: str, has_calls: bool) -> bool:
        named = {"name": "x", "arguments": "{}" if self._arguments_as_text else {}}
        call = {"id": "probe1234", "type": "function", "function": named}
        more: dict[str, Any] = {"tool_calls": [call]} if has_calls else {}
        if role == "tool":
            more["tool_call_id"] = call["id"]
        before = [] if role == "system" else [self._said("user")]
        if role == "tool":
            before.append({"role": "assistant", "content": "", "tool_calls": [call]})
        after = [self._said("user")] if role == "system" else []
        for content in ([{"type": "text", "text": _PROBE}], _PROBE):
            try:
                out = self._apply([*before, {"role": role, "content": content, **more}, *after])
            except TEMPLATE_ERRORS:
                continue
            if _PROBE in out and not _LISTED.search(out):
                return isinstance(content, list)
        return True

    def _said(self, role: str, text: str = "x") -> dict[str, Any]:
        parts = [{"type": "text", "text": text}]
        return {"role": role, "content": parts if self._takes_parts(role) else text}

    def _probe_later_systems(self) -> bool:
        """Whether system messages come out wherever they are. Some templates read the first or
        the last one alone, others refuse a second one."""
        roles = ("system", "system", "user", "assistant", "system", "user")
        texts = [f"{_PROBE}{number}" for number in range(len(roles))]
        try:
            out = self._apply(list(map(self._said, roles, texts)))
        except TEMPLATE_ERRORS:
            return False
        return all(text in out for text in texts)

    def _probe_tools(self) -> bool:
        function = {"name": _PROBE, "description": "x", "parameters": {"type": "object"}}
        try:
            out = self._apply(
                [self._said("user")], tools=[{"type": "function", "function": function}]
            )
        except TEMPLATE_ERRORS:
            return False
        return _PROBE in out

    def _probe_calls(self) -> Format | None:
        """The format in which the template writes a call; where it writes none, the vocabulary
        tells. Some templates write calls only beside tools."""
        tool = {"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}
        is_written = False
        for arguments, tools in product(({"a": "1"}, '{"a": "1"}'), (None, [tool])):
            named = {"name": _PROBE, "arguments": arguments}
            call = {"id": "probe1234", "type": "function", "function": named}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                out = self._apply([self._said("user"), said], **({"tools": tools} if tools else {}))
            except TEMPLATE_ERRORS:
                continue
            is_written |= _PROBE in out
            if (found := recognise(out, _PROBE)) is not None:
                self._arguments_as_text = isinstance(arguments, str)
                return found
        if self._takes_tools and is_written:
            return None
        known = (name for mark, name in UNTOLD if self._tokenizer.marks(mark))
        name = next(known, "" if self._takes_tools else "json")
        return FORMATS[name] if name else None

    def _role(self, role: str, path: str) -> str:
        """The template's name of a role. A template without `developer` has `system`, one without
        `tool` reads results as the user's; another role must come out of a trial rendering."""
        source = self.source or ""
        if role == "developer" and "developer" not in source:
            return "system"
        if role in ("tool", "function"):
            return "tool" if "'tool'" in source or '"tool"' in source else "user"
        known = self._roles.get(role)
        if known is None:
            known = self._takes(role)
            if len(self._roles) < _MAX_PROBED_ROLES:
                self._roles[role] = known
        if not known:
            if role == "developer":  # for templates that write one only at the beginning
                return "system"
            raise InvalidRequest(
                f"{path}.role is {role!r}, which the model's chat template does not have; use "
                "'system', 'user', 'assistant' or 'tool'",
                param=f"{path}.role",
            )
        return role

    def _takes(self, role: str) -> bool:
        try:
            return _PROBE in self._apply([self._said("user"), self._said(role, _PROBE)])
        except TEMPLATE_ERRORS:
            return False

    def _apply(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        text = self._tokenizer.hf.apply_chat_template(
            messages, chat_template=self.source, tokenize=False, **variables
        )
        assert isinstance(text, str)
        return text

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
            one_system=not self._takes_later_systems,
        )
        told: dict[str, Any] = {}
        if tools:
            self._check_text(json.dumps(tools, ensure_ascii=False), "tools")
            if self._takes_tools:
                told["tools"] = tools
            else:
                self._tell_tools(plain, tools)
        try:
            text = self._apply(
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
        if self._takes_later_systems:
            return order
        roles = [self._role(one.role, f"messages[{at}]") for at, one in enumerate(messages)]
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
            content: Any = [] if self._takes_parts("system") else ""
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
        plain: dict[str, Any] = {"role": self._role(message.role, path)}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                self._check_text(value, f"{path}.{name}")
                plain[name] = value
        reasoning = message.reasoning_content or message.reasoning
        if reasoning:
            self._check_text(reasoning, f"{path}.reasoning_content")
            plain["reasoning_content"] = reasoning
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
        as_parts = self._takes_parts(plain["role"], has_calls)
        if isinstance(content, str):
            self._check_text(content, f"{path}.content")
            content_out: Any = content
            if as_parts:
                content_out = [{"type": "text", "text": content}]
        else:
            found, text = self._plain_parts(content, f"{path}.content", parts, pages)
            content_out = found if as_parts else text
        plain["content"] = content_out
        return plain

    def _plain_calls(self, calls: Sequence[ToolCall], path: str) -> list[dict[str, Any]]:
        """Arguments as the object that they spell, which templates write out; else as they are."""
        plain = []
        for index, call in enumerate(calls):
            function = call.function
            arguments: Any = function.arguments
            if isinstance(arguments, str):
                self._check_text(arguments, f"{path}[{index}].function.arguments")
                try:
                    found = msgspec.json.decode(arguments) if arguments.strip() else {}
                    arguments = found if isinstance(found, dict) else arguments
                except (msgspec.DecodeError, RecursionError):
                    pass  # no JSON, or half a surrogate pair, which no tokenizer takes
            if self._arguments_as_text and isinstance(arguments, dict):
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
        token_ids = self._tokenizer.encode(
            conversation.text, add_special_tokens=add_special_tokens, limit=limit
        )
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
