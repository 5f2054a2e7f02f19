"""A checkpoint's chat template, and what it was found to do by rendering probes with it.

Made by chat_template.py: whether lists of content parts are read, which roles there are, how tool
calls are written. Nothing is known of a template by the name of its model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import product
from typing import Any

import jinja2

from foveal_runtime.frontend.grammars.formats import (
    FORMATS,
    THINKING,
    UNTOLD,
    Format,
    recognise,
)
from foveal_runtime.frontend.text.call_history import CallRules
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest

_PROBE = "fovealprobe"
_LISTED = re.compile(f"['\"](text|thinking)['\"]\\s*:\\s*['\"]{_PROBE}")
"""The probe's list of parts, written out as one."""
_MAX_PROBED_ROLES = 64
_SHORT_ID, _LONG_ID = "probe1234", "call_probe_0123456789"
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip


class ProbedTemplate:
    """One checkpoint's template; every answer comes from a trial rendering.

    Attributes:
        source: the template's text; None where the checkpoint has none.
        content_format: "parts" when the template reads lists of content parts, else "string" (the
            parts are joined by newlines and media stand there as the processor's placeholder text).
        takes_tools: whether the template shows the model its tools.
        takes_later_systems: whether system messages come out wherever they are.
        arguments_as_text: whether a call's arguments come as JSON's text, not as an object.
        tool_format: how the model writes tool calls; None when the template writes them in a way
            that is not known.
        thinking: the markers around reasoning; None for a template that names none.
    """

    def __init__(self, tokenizer: TextTokenizer, source: str | None, tool_format: str = "") -> None:
        self._tokenizer = tokenizer
        self.source = source
        self.content_format = "string" if source is None else self._detect()
        self._roles: dict[str, bool] = {"system": True, "user": True, "assistant": True}
        self._parts_of: dict[tuple[str, bool], bool] = {}
        self.arguments_as_text = False
        self.takes_tools = source is not None and self._probe_tools()
        self.takes_later_systems = source is not None and self._probe_later_systems()
        self.tool_format = FORMATS[tool_format] if tool_format else self._probe_calls()
        self.thinking = next((pair for pair in THINKING if pair[1] in (source or "")), None)

    def _detect(self) -> str:
        """Asks the template itself: content parts come out as their text, or they do not."""
        try:
            out = self.apply([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        except (jinja2.TemplateError, TypeError, ValueError):
            return "string"
        return "parts" if _PROBE in out and not _LISTED.search(out) else "string"

    def takes_parts(self, role: str, has_calls: bool = False) -> bool:
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
        named = {"name": "x", "arguments": "{}" if self.arguments_as_text else {}}
        call = {"id": _SHORT_ID, "type": "function", "function": named}
        more: dict[str, Any] = {"tool_calls": [call]} if has_calls else {}
        if role == "tool":
            more["tool_call_id"] = call["id"]
        opens = role in ("system", "developer")  # templates may write the first message otherwise
        before = [] if opens else [self._said("user")]
        if role == "tool":
            before.append({"role": "assistant", "content": "", "tool_calls": [call]})
        after = [self._said("user")] if opens else []
        for content in ([{"type": "text", "text": _PROBE}], _PROBE):
            if self._writes([*before, {"role": role, "content": content, **more}, *after]):
                return isinstance(content, list)
        return True

    def _said(self, role: str, text: str = "x") -> dict[str, Any]:
        parts = [{"type": "text", "text": text}]
        return {"role": role, "content": parts if self.takes_parts(role) else text}

    def _probe_later_systems(self) -> bool:
        """Whether system messages come out wherever they are. Some templates read the first or
        the last one alone, others refuse a second one."""
        roles = ("system", "system", "user", "assistant", "system", "user")
        texts = [f"{_PROBE}{number}" for number in range(len(roles))]
        try:
            out = self.apply(list(map(self._said, roles, texts)))
        except TEMPLATE_ERRORS:
            return False
        return all(text in out for text in texts)

    def _probe_tools(self) -> bool:
        function = {"name": _PROBE, "description": "x", "parameters": {"type": "object"}}
        tool = {"type": "function", "function": function}
        return self._writes([self._said("user")], tools=[tool])

    def _probe_calls(self) -> Format | None:
        """The format in which the template writes a call; where it writes none, the vocabulary
        tells. Some templates write calls only beside tools."""
        tool = {"type": "function", "function": {"name": "x", "description": "", "parameters": {}}}
        is_written = False
        for arguments, tools in product(({"a": "1"}, '{"a": "1"}'), (None, [tool])):
            named = {"name": _PROBE, "arguments": arguments}
            call = {"id": _SHORT_ID, "type": "function", "function": named}
            said = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                out = self.apply([self._said("user"), said], **({"tools": tools} if tools else {}))
            except TEMPLATE_ERRORS:
                continue
            is_written |= _PROBE in out
            if (found := recognise(out, _PROBE)) is not None:
                self.arguments_as_text = isinstance(arguments, str)
                return found
        if self.takes_tools and is_written:
            return None
        known = (name for mark, name in UNTOLD if self._tokenizer.marks(mark))
        name = next(known, "" if self.takes_tools else "json")
        return FORMATS[name] if name else None

    @cached_property
    def takes_systems(self) -> bool:
        """Whether a system message at the beginning comes out; Gemma 2's refuses it."""
        return self._writes([self._said("system", _PROBE), self._said("user")])

    @cached_property
    def takes_thinking_parts(self) -> bool:
        """Whether the model's reasoning is a part of its message, as with Mistral's templates."""
        parts = [{"type": "thinking", "thinking": _PROBE}, {"type": "text", "text": "x"}]
        said = {"role": "assistant", "content": parts}
        return self._writes([self._said("user"), said, self._said("user")])

    def _writes(self, messages: list[dict[str, Any]], **variables: Any) -> bool:
        """Whether the probe comes out, and not in a list that is written out."""
        try:
            out = self.apply(messages, **variables)
        except TEMPLATE_ERRORS:
            return False
        return _PROBE in out and not _LISTED.search(out)

    @cached_property
    def call_rules(self) -> CallRules:
        """What it takes of calls in a conversation."""
        one = self._writes_calls(1, _LONG_ID)
        any_id = one or not self._writes_calls(1, _SHORT_ID)
        name = _LONG_ID if any_id else _SHORT_ID
        if any_id and not one:
            return CallRules()
        after = self._writes_calls(1, name, more=[self._said("user")])
        return CallRules(any_id, self._writes_calls(2, name), after)

    @cached_property
    def takes_odd_arguments(self) -> bool:
        """Whether a call may have arguments that are no object, as those that were cut off."""
        return self._writes_calls(1, _SHORT_ID, '{"a') or not self._writes_calls(1, _SHORT_ID)

    @cached_property
    def takes_thought_and_text(self) -> bool:
        """Whether calls may have both beside them. gpt-oss' template refuses that: it writes one of
        them, as analysis."""
        both: Any = {"content": "x", "reasoning_content": "x", "reasoning": "x"}
        name = _LONG_ID if self.call_rules.any_id else _SHORT_ID
        return self._writes_calls(1, name, **both) or not self._writes_calls(1, name)

    def _writes_calls(
        self,
        num: int,
        name: str,
        arguments: Any = None,
        more: Sequence[dict[str, Any]] = (),
        **beside: str,
    ) -> bool:
        """Whether so many calls of one message, with their results and what follows, come out.
        `beside`: of the message with the calls."""
        if arguments is None:
            arguments = "{}" if self.arguments_as_text else {}
        calls: list[dict[str, Any]] = [
            {"id": f"{number}{name[1:]}", "type": "function",
             "function": {"name": f"{_PROBE}{number}", "arguments": arguments}}
            for number in range(num)
        ]  # fmt: skip
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
        said = {"role": "assistant", "content": "", "tool_calls": calls, **beside}
        try:
            out = self.apply([self._said("user"), said, *results, *more])
        except TEMPLATE_ERRORS:
            return False
        return all(call["function"]["name"] in out for call in calls)

    def role(self, role: str, path: str) -> str:
        """The template's name of a role. A template without `developer` has `system`. One that does
        not name `tool` reads results as the user's, unless it takes tools and writes any role (as
        LFM2.5's does). Another role must come out of a trial rendering."""
        source = self.source or ""
        if role == "developer" and "developer" not in source:
            return "system"
        if role in ("tool", "function"):
            named = "'tool'" in source or '"tool"' in source
            is_any = self.takes_tools and "tool_calls" in source
            return "tool" if named or (is_any and self._takes("tool")) else "user"
        if not self._takes(role):
            if role == "developer":  # for templates that write one only at the beginning
                return "system"
            raise InvalidRequest(
                f"{path}.role is {role!r}, which the model's chat template does not have; use "
                "'system', 'user', 'assistant' or 'tool'",
                param=f"{path}.role",
            )
        return role

    def _takes(self, role: str) -> bool:
        known = self._roles.get(role)
        if known is None:
            known = self._writes([self._said("user"), self._said(role, _PROBE)])
            if len(self._roles) < _MAX_PROBED_ROLES:
                self._roles[role] = known
        return known

    def apply(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        text = self._tokenizer.hf.apply_chat_template(
            messages, chat_template=self.source, tokenize=False, **variables
        )
        assert isinstance(text, str)
        return text
