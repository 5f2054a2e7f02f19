"""What a chat template says about tools and reasoning, and what a request makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken

from foveal_runtime.frontend.grammars.compiler import Compiled
from foveal_runtime.frontend.http.chat import plan_turn, template_variables
from foveal_runtime.frontend.protocol.constraints import calls_of
from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.frontend.testing.fake import FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE, STRING_TEMPLATE, byte_tokenizer
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks closer."}}
USER = {"role": "user", "content": "hi"}
HEAD = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
TAIL = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = "{{ m.content }}{% for c in m.tool_calls or [] %}%s{% endfor %}"
JSON_CALL = '{"name": "{{ c.function.name }}", "%s": {{ c.function.arguments | tojson }}}'


def template(source: str, *marks: str, tool_format: str = "") -> ChatTemplate:
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken(mark) for mark in marks])
    info = FakeInputProcessor({"image": (IMAGE, "<image>")})
    return ChatTemplate(TextTokenizer(hf), source, info, tool_format)


def with_calls(call: str) -> str:
    return HEAD + CALLS.replace("%s", call) + TAIL


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("<tool_call>\n" + JSON_CALL % "arguments" + "\n</tool_call>", "hermes"),
        (JSON_CALL % "parameters", "llama3_json"),
        ("[TOOL_CALLS] [" + JSON_CALL % "arguments" + "]", "mistral_v3"),
        ("[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}", "mistral"),
        ("<tool_call>{{ c.function.name }}\n<arg_key>a</arg_key></tool_call>", "glm"),
        ("<tool_call>\n<function={{ c.function.name }}>\n</function></tool_call>", "qwen3_coder"),
        ("[{{ c.function.name }}(a=1)]", "pythonic"),
        (
            "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' "
            "+ c.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}",
            "deepseek",
        ),
        ("<tool_call>[" + JSON_CALL % "arguments" + "]</tool_call>", "smolvlm"),
    ],
)
def test_the_template_tells_its_format(call: str, name: str) -> None:
    found = template(with_calls(call))
    assert found.tool_format is not None
    assert found.tool_format.name == name
    assert template(with_calls(call), tool_format="kimi").tool_format.name == "kimi"  # type: ignore[union-attr]
    message = {"role": "assistant", "content": "", "tool_calls": [
        {"id": "c", "function": {"name": "look", "arguments": '{"a": "1"}'}}]}  # fmt: skip
    text = found.render([Message(**USER), Message(**message)], tools=[TOOL]).text
    assert found.tool_format.opening("look").split() == [
        word for word in found.tool_format.opening("look").split() if word in text
    ]


@pytest.mark.parametrize(
    ("marks", "name"),
    [((), "json"), (("<tool_call>",), "hermes"), (("<end_of_utterance>",), "smolvlm")],
)
def test_without_tools_in_the_template_a_system_message_tells_them(
    marks: tuple[str, ...], name: str
) -> None:
    found = template(STRING_TEMPLATE, *marks)
    assert found.tool_format is not None
    assert found.tool_format.name == name
    text = found.render([Message(**USER)], tools=[TOOL]).text
    assert text.startswith("<|system|>You can call functions.")
    assert "Looks closer." in text
    assert found.tool_format.opening("name_of_function") in text


def test_an_unknown_form_is_refused_and_formats_are_named() -> None:
    found = template(with_calls("CALL {{ c.function.name }}!"))
    assert found.tool_format is None
    with pytest.raises(InvalidRequest, match=r"--tool-format .*hermes, .*json"):
        planned(found, tools=[TOOL])


def planned(found: ChatTemplate, prompt: str = "", **options: Any) -> Any:
    request = ChatCompletionRequest(messages=[USER], **options)
    tokenizer = found._tokenizer
    return plan_turn(request, found, tokenizer, calls_of(request), prompt, Compiled(""))


THINKER = HEAD + "{{ m.content }}</think>{{ enable_thinking }}" + TAIL


def test_reasoning_begins_where_the_prompt_ends() -> None:
    found = template(THINKER, "<think>", "</think>")
    assert found.thinking == ("<think>", "</think>")
    for prompt, is_thinking in (
        ("<|assistant|><think>\n", True), ("<|assistant|>", False),
        ("<|assistant|><think>\n\n</think>\n\n", False),
    ):  # fmt: skip
        turn, wanted = planned(found, prompt)
        assert (turn.is_thinking, wanted) == (is_thinking, None)
    assert planned(found, "", thinking_token_budget=7)[1].source["think"]["budget"] == 7
    assert planned(template(STRING_TEMPLATE)) == (None, None)


@pytest.mark.parametrize(
    ("content", "is_thinking"),
    [
        ("<think>The sky", True),
        ([{"type": "text", "text": "<think>The"}, {"type": "text", "text": " sky"}], True),
        ("<think>The sky</think>It is", False),
        ("It is", False),
    ],
)
def test_reasoning_goes_on_in_a_message_that_is_continued(content: Any, is_thinking: bool) -> None:
    """All that the model still thought, and the mark at its end, were the answer's text."""
    found = template(THINKER, "<think>", "</think>")
    said = {"role": "assistant", "content": content}
    request = ChatCompletionRequest(messages=[USER, said], continue_final_message=True)
    turn, _ = plan_turn(request, found, found._tokenizer, None, "<think>The sky", Compiled(""))
    assert turn.is_thinking == is_thinking


def test_efforts_are_variables_of_templates_that_take_them() -> None:
    thinker, plain = template(THINKER, "</think>"), template(STRING_TEMPLATE)

    def variables(found: ChatTemplate, **options: Any) -> Any:
        return template_variables(ChatCompletionRequest(messages=[USER], **options), found)

    for effort in ("none", "low", "high"):
        found = variables(thinker, reasoning_effort=effort)
        assert found == {"enable_thinking": effort != "none", "reasoning_effort": effort}
    mixed = variables(
        thinker, reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}
    )
    assert mixed["enable_thinking"] is False
    assert variables(plain, reasoning_effort="none") == {}
    with pytest.raises(Unsupported, match="takes no effort"):
        variables(plain, reasoning_effort="high")
    with pytest.raises(Unsupported, match="does not reason"):
        planned(plain, thinking_token_budget=3)
