"""The bundled model's template and tokenizer: what it learnt before tools stands as it did."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from foveal_runtime.frontend.protocol.messages import ImagePart, Message, TextPart
from foveal_runtime.frontend.testing.fake import FakeInputProcessor
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.template_files import load_templates
from foveal_runtime.frontend.text.tokenizer import TextTokenizer

MODEL = Path(__file__).resolve().parents[4] / "examples" / "tiny-vlm" / "model"
IMAGE = 3
NUM_OLD_TOKENS = 850
PICTURE = ImagePart(type="image_url", uuid="u")
CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"place":"top left"}'},
}
TOOLS = [
    {"type": "function", "function": {
        "name": "look", "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}},
    {"type": "function", "function": {"name": "time"}},
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer(AutoTokenizer.from_pretrained(MODEL))


@pytest.fixture(scope="module")
def template(tokenizer: TextTokenizer) -> ChatTemplate:
    info = FakeInputProcessor({"image": (IMAGE, "<image>")})
    return ChatTemplate(tokenizer, load_templates(MODEL, tokenizer).default, info)


def test_plain_questions_are_what_they_were(template, tokenizer) -> None:  # type: ignore[no-untyped-def]
    question = TextPart(type="text", text="what colour is the circle?")
    talk = template.render([
        Message(role="system", content="be precise."),
        Message(role="user", content=[PICTURE, question]),
        Message(role="assistant", content="red"),
        Message(role="user", content="how many?"),
    ])  # fmt: skip
    assert talk.text == (
        "<s><|system|>be precise.</s><|user|><image>what colour is the circle?</s>"
        "<|assistant|>red</s><|user|>how many?</s><|assistant|>"
    )
    ids = template.encode(talk, add_special_tokens=False)
    assert max(ids) < NUM_OLD_TOKENS
    assert ids.count(IMAGE) == 1


def test_calls_and_results_are_written_as_they_were_learnt(template) -> None:  # type: ignore[no-untyped-def]
    assert template.tool_format.name == "hermes"
    messages = [
        Message(role="user", content="use look at the top left."),
        Message(role="assistant", content=None, tool_calls=[CALL]),  # type: ignore[list-item]
        Message(role="tool", tool_call_id="call-1", content=[PICTURE]),
    ]
    assert template.render(messages, tools=TOOLS).text == (
        "<s><|system|>tools: look(place), time()</s><|user|>use look at the top left.</s>"
        '<|assistant|><tool_call>\n{"name": "look", "arguments": {"place": "top left"}}\n'
        "</tool_call></s><|tool|><image></s><|assistant|>"
    )
