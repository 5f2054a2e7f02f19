"""Conversations with calls of tools, from any server, for templates that take them in one form."""

from __future__ import annotations

from typing import Any

import pytest

from foveal_runtime.frontend.protocol.messages import ImagePart, Message, TextPart
from foveal_runtime.frontend.testing.fake import FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE, byte_tokenizer
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest

TEXT = "{{ m.content if m.content is string else m.content[0].text }}"
CALL = "(%s{{ c.function.name }})"
RESULT = "{% if m.role == 'tool' %}[%s{{ m.content }}]{% else %}"
TAIL = "{% endif %}{% endfor %}"
ANY = "{% for m in messages %}" + RESULT + TEXT + "{% for c in m.tool_calls or [] %}" + CALL
ANY += "{% endfor %}" + TAIL
PLAIN = ANY.replace("%s", "")
SHORT = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}{% endfor %}"
    "{% if m.role == 'tool' and (m.tool_call_id is undefined or m.tool_call_id | length != 9) %}"
    "{{ raise_exception('ids have length 9') }}{% endif %}{% endfor %}"
) + ANY.replace("(%s", "({{ c.id }} ").replace("[%s", "[{{ m.tool_call_id }} ")
ONE = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}{% endfor %}"
) + PLAIN
FIRST = PLAIN.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
NAMED = PLAIN.replace("{{ m.content }}]", "{{ m.tool_call_id }} {{ m.content }}]")


def template(source: str) -> ChatTemplate:
    info = FakeInputProcessor({"image": (IMAGE, "<image>")})
    return ChatTemplate(TextTokenizer(byte_tokenizer()), source, info)


def call(name: str, call_id: str | None) -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": "{}"}}


def talk(*ids: str | None, results: tuple[str | None, ...] = ()) -> list[Message]:
    """Calls a, b, ... of these ids, and the results 0, 1, ... of those."""
    calls = [call(name, call_id) for name, call_id in zip("abc", ids, strict=False)]
    found = [
        Message(role="tool", content=str(number), tool_call_id=one)
        for number, one in enumerate(results)
    ]
    return [Message(role="user", content="u"),
            Message(role="assistant", content="t", tool_calls=calls), *found]  # fmt: skip


def test_ids_of_other_servers_become_those_that_a_template_takes() -> None:
    """Mistral's templates refuse every id that is not nine letters and digits."""
    found = template(SHORT)
    own = found.render(talk("abcdef123", results=("abcdef123",))).text
    assert own == "ut(abcdef123 a)[abcdef123 0]"
    names = ("toolu_01A09q90qw90lq917835lq9", "call_1", "")
    for asked in (talk(*names, results=names), talk(None, None, None, results=names[:0])):
        text = found.render(asked).text
        ids = [part[:9] for part in text.replace("[", "(").split("(")[1:]]
        assert all(one.isalnum() for one in ids)
        assert len(set(ids)) == 3
        assert ids[3:] in ([], ids[:3])
        assert found.render(asked).text == text


@pytest.mark.parametrize("source", [ONE, FIRST])
def test_calls_of_one_message_stand_each_before_its_result(source: str) -> None:
    """Llama's templates refuse two calls in a message, which its model writes; others left out all
    but the first."""
    found = template(source)
    both = talk("x", "y", results=("x", "y"))
    assert found.render(both).text == "ut(a)[0](b)[1]"
    assert found.render(talk("x", "y", results=("y", "x"))).text == "ut(b)[0](a)[1]"
    assert found.render(talk("x", "y", results=("x",))).text == "ut(a)[0](b)"
    assert found.render([*talk("x", "y"), both[0]]).text == "ut(a)(b)u"
    assert found.render([*both, *both[1:]]).text == "ut(a)[0](b)[1]t(a)[0](b)[1]"
    assert template(PLAIN).render(both).text == "ut(a)(b)[0][1]"


def test_results_without_an_id_answer_the_calls_in_their_order() -> None:
    """Gemma's template names a result by its call, and refused one without."""
    found = template(NAMED)
    asked = talk("x", "y", "z", results=("y", None, None))
    assert found.render(asked).text == "ut(a)(b)(c)[y 0][x 1][z 2]"


def test_media_of_results_keep_their_order() -> None:
    source = ONE.replace(
        "{{ m.content }}]",
        "{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}]",
    )
    asked = talk("x", "y")
    for number, name in enumerate("yx"):
        parts = [TextPart(type="text", text=name), ImagePart(type="image_url", uuid=str(number))]
        asked.append(Message(role="tool", content=parts, tool_call_id=name))
    found = template(source).render(asked)
    assert found.text == "ut(b)[y<image>](a)[x<image>]"
    assert [part.uuid for part in found.parts] == ["0", "1"]


ITEMS = PLAIN.replace("%s", "").replace(
    ".name }}", ".name }}{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}"
)
WRITTEN = PLAIN.replace(".name }}", ".name }} {{ c.function.arguments | tojson }}")


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "Rome", "null"])
def test_arguments_that_are_no_object_do_not_end_a_conversation(arguments: str) -> None:
    """A call that max_tokens cut off made every later request with it a 400, where the template
    goes through the arguments one by one (Qwen3.5, GLM)."""
    asked = talk("x", results=("x",))
    assert asked[1].tool_calls is not None
    asked[1].tool_calls[0].function.arguments = arguments
    assert template(ITEMS).render(asked).text == "ut(a)[0]"
    assert template(WRITTEN).render(asked).text.startswith('ut(a "')
    asked[1].tool_calls[0].function.arguments = '{"city": "Rome"}'
    assert template(ITEMS).render(asked).text == "ut(a city=Rome)[0]"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
def test_reasoning_comes_under_the_name_that_a_template_reads(name: str, sent: str) -> None:
    """Solar's reads `reasoning`: what was sent back was left out."""
    thought = "{% if m.NAME %}<think>{{ m.NAME }}</think>{% endif %}".replace("NAME", name)
    found = template(PLAIN.replace(TEXT, thought + TEXT))
    said = Message(role="assistant", content="t", **{sent: "hm"})
    asked = [Message(role="user", content="u"), said]
    assert found.render(asked).text == "u<think>hm</think>t"


def test_reasoning_is_a_part_where_a_template_reads_it_there() -> None:
    """Ministral 3's and Magistral's: the model did not see what it had thought before."""
    part = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}"
        "{% endif %}{% endfor %}{% endif %}"
    )
    found = template(PLAIN.replace(TEXT, part))
    parts = [TextPart(type="text", text="t")]
    call = {"id": "x", "function": {"name": "a", "arguments": "{}"}}
    for content, calls, written in (("t", [], "t"), (parts, [], "t"), (None, [call], "(a)")):
        said = Message(role="assistant", content=content, tool_calls=calls, reasoning_content="hm")
        asked = [Message(role="user", content="u"), said, Message(role="user", content="v")]
        assert found.render(asked).text == f"u[THINK]hm[/THINK]{written}v"
    said = Message(role="assistant", content="t", reasoning_content="hm")
    for source in (PLAIN, PLAIN.replace(TEXT, "{{ m.content }}")):
        assert template(source).render([Message(role="user", content="u"), said]).text == "ut"


def test_a_template_that_takes_tools_and_writes_any_role_has_a_role_for_results() -> None:
    """LFM2.5's names no `tool`: the model read results as the user's words."""
    calls = "{% for c in m.tool_calls or [] %}({{ c.function.name }}){% endfor %}"
    source = "{% for m in messages %}<|{{ m.role }}|>" + TEXT + calls + "{% endfor %}"
    asked = talk("x", results=("x",))
    assert template(source).render(asked).text == "<|user|>u<|assistant|>t(a)<|user|>0"
    taught = template("{{ tools }}" + source)
    assert taught.render(asked).text.endswith("<|user|>u<|assistant|>t(a)<|tool|>0")


def test_what_the_user_says_after_a_result_is_its_end_where_a_template_takes_no_user_there() -> (
    None
):
    """Mistral's templates: Claude Code sends text beside results, and every such turn was a 400."""
    source = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.first "
        "and messages[loop.index0 - 1].role == 'tool' %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    ) + PLAIN
    asked = talk("x", results=("x",))
    parts = [TextPart(type="text", text="a"), TextPart(type="text", text="b")]
    for content, text in (("go on", "go on"), (parts, "a\nb")):
        said = [*asked, Message(role="user", content=content)]
        assert template(source).render(said).text == f"ut(a)[0\n\n{text}]"
        assert template(PLAIN).render(said).text.startswith("ut(a)[0]")
    image = ImagePart(type="image_url", uuid="1")
    with pytest.raises(InvalidRequest, match="alternate"):
        template(source).render([*asked, Message(role="user", content=[image])])


def test_reasoning_and_text_beside_calls_are_one_where_a_template_takes_one_of_them() -> None:
    """gpt-oss' template refuses both, and every such turn was a 400."""
    either = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.reasoning_content %}"
        "{{ raise_exception('not both') }}{% endif %}{% endfor %}"
    )
    source = PLAIN.replace(TEXT, "{{ m.content }}{{ m.reasoning_content }}")
    asked, said, result = talk("x", results=("x",))
    both = said.model_copy(update={"reasoning_content": "hm"})
    assert template(either + source).render([asked, both, result]).text == "uhm\n\nt(a)[0]"
    assert template(source).render([asked, both, result]).text == "uthm(a)[0]"
    alone = both.model_copy(update={"content": None})
    assert template(either + source).render([asked, alone, result]).text == "uhm(a)[0]"
