"""Chat templates of published models: the format of their calls, and histories with calls."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import AddedToken

from foveal_runtime.frontend.grammars.formats import FORMATS, render_calls
from foveal_runtime.frontend.protocol.messages import Message
from foveal_runtime.frontend.testing.fake import FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE, byte_tokenizer
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from tests.support import packages

pytestmark = pytest.mark.extended

PINNED = packages.REQUIREMENTS / "chat-templates.txt"
PUBLISHED = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "MiMo-VL": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "unsloth-mistral-Devstral-Small-2507": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_v11",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral_v3",
    "LFM2-8B-A1B": "lfm2",
    "LFM2.5-8B-A1B": "lfm2",
    "google-gemma-4-31B-it": "gemma",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "GLM-4.6": "glm",
    "moonshotai-Kimi-K2": "kimi",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "microsoft-Phi-3.5-mini-instruct": "json",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": None,
    "MiniMax-M2": None,
}
THINKING = {"Qwen-Qwen3-0.6B", "Qwen3.5-4B", "deepseek-ai-DeepSeek-V3.1", "GLM-4.6",
            "mistralai-Ministral-3-14B-Reasoning-2512", "google-gemma-4-31B-it"}  # fmt: skip
MORE_TOKENS = {"LFM2-8B-A1B": ("<|tool_call_start|>", "<|tool_call_end|>")}
"""Of the model's vocabulary, where the template does not spell them."""
MARK = re.compile(r"</?\|?[a-z_/]+\|?>|\[/?[A-Z_]+\]|<｜[^<>]*｜>")
TOOL = {"type": "function", "function": {
    "name": "look", "description": "Looks closer.", "parameters": {
        "type": "object", "properties": {
            "city": {"type": "string", "description": "where"},
            "n": {"type": "integer", "description": "how often"}}}}}  # fmt: skip
ARGUMENTS = {"city": "Rome", "n": 3}
HISTORY = [
    Message(role="user", content="hi"),
    Message(role="assistant", content="", tool_calls=[
        {"id": "call00000", "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}]),
    Message(role="tool", content="sunny there", tool_call_id="call00000"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    def make(work: Path) -> None:
        packages.archive(PINNED, "llama_cpp_python-*/vendor/llama.cpp/models/templates", work)

    return packages.or_skip(lambda: packages.cached("chat-templates", PINNED, make))


def template_of(folder, name) -> ChatTemplate:
    source = (folder / f"{name}.jinja").read_text(encoding="utf-8")
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken(m) for m in {*MARK.findall(source), *MORE_TOKENS.get(name, ())}])
    return ChatTemplate(TextTokenizer(hf), source, FakeInputProcessor({"image": (IMAGE, "<im>")}))


def squeezed(text: str) -> str:
    """Without blanks, the kind of quotes, and ids of calls, which some templates add."""
    text = "".join(text.split()).replace("'", '"')
    return re.sub(r',"id":"[^"]*"', "", text)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_template_tells_its_format(folder, name):
    found, expected = template_of(folder, name), PUBLISHED[name]
    assert (found.tool_format and found.tool_format.name) == expected
    assert (found.thinking is not None) >= (name in THINKING)
    text = found.render(HISTORY, tools=[TOOL]).text
    assert "Looks closer." in text
    assert "sunny there" in text
    assert not re.search("['\"]text['\"]: ?['\"](sunny|hi)", text), "parts written as a list"
    if expected is not None:
        schemas = {"look": TOOL["function"]["parameters"]}
        call = render_calls(FORMATS[expected], [("look", ARGUMENTS)], schemas)
        assert squeezed(call) in squeezed(text)


@pytest.mark.parametrize("name", sorted(THINKING - {"deepseek-ai-DeepSeek-V3.1"}))
def test_reasoning_that_is_sent_back_is_in_the_prompt(folder, name):
    """DeepSeek V3.1's leaves it out."""
    asked, called, result = HISTORY
    thought = called.model_copy(update={"reasoning_content": "what a day"})
    assert "what a day" in template_of(folder, name).render([asked, thought, result]).text


def test_reasoning_and_text_before_a_call_are_gpt_oss_analysis(folder):
    asked, called, result = HISTORY
    both = called.model_copy(update={"content": "I look.", "reasoning_content": "what a day"})
    text = template_of(folder, "openai-gpt-oss-120b").render([asked, both, result]).text
    analysis = "<|channel|>analysis<|message|>what a day\n\nI look.<|end|>"
    assert f"{analysis}<|start|>assistant to=functions.look" in text


def test_every_row_has_a_template_or_a_reason():
    """Llama 4's and SmolVLM's own templates are in no package: their rows are tried with templates
    of ours (`test_turns`)."""
    assert set(FORMATS) - set(PUBLISHED.values()) == {"pythonic", "smolvlm"}
