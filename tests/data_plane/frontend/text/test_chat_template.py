"""Templates that read parts, templates that read strings, and none at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foveal_runtime.frontend.protocol.messages import ImagePart, Message, TextPart
from foveal_runtime.frontend.testing.fake import FakeInputProcessor
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE, STRING_TEMPLATE, byte_tokenizer
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.template_files import load_templates
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest, StartupError, Unsupported

PARTS = [
    TextPart(type="text", text="a"),
    ImagePart(type="image_url", uuid="u"),
    TextPart(type="text", text="b"),
]


def template(source: str | None, placeholder: str = "<image>") -> ChatTemplate:
    info = FakeInputProcessor({"image": (IMAGE, placeholder)})
    return ChatTemplate(TextTokenizer(byte_tokenizer()), source, info)


def test_string_templates_get_placeholders_where_the_parts_are() -> None:
    found = template(STRING_TEMPLATE)
    assert found.probed.content_format == "string"
    talk = found.render([Message(role="user", content=PARTS)])
    assert talk.text == "<|user|>a\n<image>\nb<|end|><|assistant|>"
    assert found.encode(talk, add_special_tokens=False).count(IMAGE) == 1
    wrapped = template(STRING_TEMPLATE, "<|user|><image><|end|>")
    assert wrapped.encode(
        wrapped.render([Message(role="user", content=PARTS)]), add_special_tokens=False
    ).count(IMAGE) == 1  # fmt: skip


def test_part_templates_get_parts() -> None:
    found = template(byte_tokenizer().chat_template)
    assert found.probed.content_format == "parts"
    talk = found.render([Message(role="user", content=PARTS)], add_generation_prompt=False)
    assert talk.text == "<|user|>a<image>b<|end|>"


def test_a_template_that_drops_media_is_an_error_not_a_silence() -> None:
    blind = template("{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}"
                     "{% endfor %}")  # fmt: skip
    talk = blind.render([Message(role="user", content=PARTS)])
    with pytest.raises(InvalidRequest, match="1 image parts became 0"):
        blind.encode(talk, add_special_tokens=False)


def test_a_template_may_refuse() -> None:
    strict = template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="alternate"):
        strict.render([Message(role="user", content="a")])
    with pytest.raises(Unsupported, match="completions"):
        template(None).render([Message(role="user", content="a")])


def test_templates_cannot_reach_out() -> None:
    """The template comes with the checkpoint; it runs in a sandbox."""
    nasty = template("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest):
        nasty.render([Message(role="user", content="a")])


def test_the_processors_template_comes_first(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    assert load_templates(tmp_path, tokenizer).default == byte_tokenizer().chat_template
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor's"}))
    assert load_templates(tmp_path, tokenizer).default == "processor's"
    (tmp_path / "processor_config.json").write_text(json.dumps({"chat_template": "older"}))
    assert load_templates(tmp_path, tokenizer).default == "older"
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"chat_template": {one["name"]: one["template"] for one in named}})
    )
    assert load_templates(tmp_path, tokenizer) == ("d", "t")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)


FOR_TOOLS = (
    "{% for t in tools %}<tools>{{ t | tojson }}</tools>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}\n'
    "</tool_call>{% endfor %}{% endfor %}"
)


def test_a_template_of_its_own_for_tools_is_used_for_them(tmp_path: Path) -> None:
    """Tools were described by a system message, in words that the model was never trained on."""
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(STRING_TEMPLATE)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(FOR_TOOLS)
    tokenizer = TextTokenizer.load(tmp_path)
    default, for_tools = load_templates(tmp_path, tokenizer)
    info = FakeInputProcessor({"image": (IMAGE, "<image>")})
    found = ChatTemplate(tokenizer, default, info, tool_template=for_tools)
    assert found.tool_format is not None
    assert found.tool_format.name == "hermes"
    hi = [Message(role="user", content="hi")]
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert found.render(hi, tools=[tool]).text.startswith('<tools>{"type": "function"')
    assert found.render(hi).text == "<|user|>hi<|end|><|assistant|>"


ANY_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}{{ \'<tool_call>\\n{"name": "\' + c.function.name + '
    "'\", \"arguments\": ' + c.function.arguments + '}\\n</tool_call>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)
"""Reads the user's parts, everybody else's text, and arguments as text."""


def test_roles_are_bounded() -> None:
    """Each new one was rendered again, and remembered for ever."""
    found = template(ANY_ROLE)
    for number in range(120):
        found.render([Message(role=f"r{number}", content="a")])
    assert len(found.probed._parts_of) <= 64
    many = [Message(role=f"r{number}", content="a") for number in range(17)]
    assert found.render(many[:16]).text.startswith("<|r0|>a")
    with pytest.raises(InvalidRequest, match="one role more than the 16") as caught:
        found.render([*many[:16], many[0], many[16]])
    assert caught.value.param == "messages[17].role"


def test_a_template_that_takes_arguments_as_text_is_asked_with_text() -> None:
    """It refused both spellings of the question, and got parts that it wrote out as a list."""
    call = {"id": "c", "function": {"name": "look", "arguments": '{"a": 1}'}}
    said = Message(role="assistant", content="hi", tool_calls=[call])
    text = template(ANY_ROLE).render([Message(role="user", content="x"), said]).text
    assert "<|assistant|>hi<tool_call>" in text


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>"
)
LISTS = "{% for p in m.content %}{{ p.text | trim if p.type == 'text' else '<image>' }}{% endfor %}"


@pytest.mark.parametrize("write", [LISTS, "{{ m.content }}"])
def test_results_of_tools_are_one_message_of_the_user(write: str) -> None:
    """Gemma 3 and Pixtral have no role `tool` and refuse two messages of the user in a row: two
    results, or a result with a text after it, were a 400."""
    calls = [{"id": f"c{n}", "function": {"name": "look", "arguments": "{}"}} for n in range(2)]
    asked = [
        Message(role="user", content="u"),
        Message(role="assistant", content="a", tool_calls=calls),
    ]
    results = [
        Message(role="tool", content="first", tool_call_id="c0"),
        Message(role="tool", content=[TextPart(type="text", text="second"), PARTS[1]]),
        Message(role="user", content=PARTS),
    ]
    found = template(ALTERNATING + write + "{% endfor %}")
    talk = found.render([*asked, *results], add_generation_prompt=False)
    line = "" if write == LISTS else "\n"
    wanted = f"<|user|>first\nsecond{line}<image>{line}a{line}<image>{line}b"
    assert talk.text.endswith(wanted)
    assert [part.path for part in talk.parts] == [
        "messages[3].content[1]",
        "messages[4].content[1]",
    ]
    two = [Message(role="user", content="x"), Message(role="user", content="y")]
    with pytest.raises(InvalidRequest, match="alternate"):
        found.render(two)


def test_json_in_the_templates_own_text_is_no_list_of_parts() -> None:
    source = "Reply as [{'type': 'text'}]. " + byte_tokenizer().chat_template
    assert template(source).probed.content_format == "parts"
    assert (
        template("{% for m in messages %}{{ m.content }}{% endfor %}").probed.content_format
        == "string"
    )


PIECE = "{{ m.content if m.content is string else m.content[0].text }}"
FIRST = (
    "{% if messages[0].role == 'system' %}{% set m = messages[0] %}<|system|>"
    + PIECE
    + "{% endif %}"
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>" + PIECE
)
LAST = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = '<|system|>' + "
    + PIECE.strip("{} ").join("()")
    + " %}{% endif %}{% endfor %}{{ ns.system }}"
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>" + PIECE
)
REFUSED = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% else %}<|{{ m.role }}|>"
) + PIECE
LATER = [
    Message(role="system", content="one"),
    Message(role="developer", content=[TextPart(type="text", text="two")]),
    Message(role="user", content="u"),
    Message(role="system", content="three"),
    Message(role="user", content="v"),
    Message(role="assistant", content="a"),
    Message(role="user", content="w"),
]


@pytest.mark.parametrize("source", [FIRST, LAST, REFUSED])
def test_later_system_messages_are_part_of_the_first(source: str) -> None:
    """Qwen3-VL reads the first alone, DeepSeek's distilled models the last, and Qwen3.5 refuses a
    second one: Codex and Claude Code send several."""
    found = template(source + "{% endif %}{% endfor %}")
    wanted = "<|system|>one\n\ntwo\n\nthree<|user|>u\nv<|assistant|>a<|user|>w"
    assert found.render(LATER).text == wanted
    assert found.render(LATER[2:4]).text == "<|system|>three<|user|>u"
    users = [LATER[0], LATER[2], LATER[4]]
    assert found.render(users).text == "<|system|>one<|user|>u<|user|>v"


@pytest.mark.parametrize("write", [LISTS, "{{ m.content }}"])
@pytest.mark.parametrize("refused", ["{{ raise_exception('System role not supported') }}", ""])
def test_system_messages_begin_the_users_turn_where_a_template_has_none(
    write: str, refused: str
) -> None:
    """Gemma 2's refuses them, and so every request with tools, which it has none for; others leave
    them out without a word."""
    source = (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + f"{refused}{{% else %}}<|{{{{ m.role }}}}|>{write}"
        + "{% endif %}{% endfor %}"
    )
    found = template(source)
    assert found.render(LATER).text == (
        "<|user|>one\n\ntwo\n\nthree\n\nu\nv<|assistant|>a<|user|>w"
    )
    assert found.render(LATER[:1]).text == "<|user|>one"
    assert found.render([LATER[0], LATER[5]]).text == "<|user|>one<|assistant|>a"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    told = found.render([LATER[2]], tools=[tool]).text
    assert told.startswith("<|user|>You can call functions.")
    assert '"look"' in told
    assert told.endswith("\n\nu")
    talk = found.render([LATER[0], Message(role="user", content=PARTS)])
    assert talk.text.startswith("<|user|>one\n\na")
    assert len(talk.parts) == 1


def test_developers_are_systems_where_a_template_takes_one_only_at_the_beginning() -> None:
    """gpt-oss names the role, but leaves out or refuses such a message after the first."""
    source = FIRST.replace("== 'system'", "in ['system', 'developer']")
    source = source.replace("!= 'system'", "not in ['system', 'developer']")
    wanted = "<|system|>one\n\ntwo\n\nthree<|user|>u\nv<|assistant|>a<|user|>w"
    found = template(source + "{% endif %}{% endfor %}")
    assert found.render(LATER).text == wanted
    assert found.render(LATER[1:3]).text == "<|system|>two<|user|>u"


def test_templates_that_take_later_system_messages_get_them_where_they_are() -> None:
    wanted = "<|system|>one<|end|><|system|>two<|end|><|user|>u<|end|><|system|>three<|end|>"
    assert template(STRING_TEMPLATE).render(LATER[:4]).text == f"{wanted}<|assistant|>"


def test_media_follow_a_system_message_to_the_beginning() -> None:
    source = LISTS.join(
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('no') }}{% endif %}<|{{ m.role }}|>",
            "{% endfor %}",
        )
    )
    asked = [Message(role="user", content=PARTS), Message(role="system", content=PARTS)]
    talk = template(source).render(asked, add_generation_prompt=False)
    assert talk.text == "<|system|>a<image>b<|user|>a<image>b"
    assert [part.path for part in talk.parts] == [
        "messages[1].content[1]",
        "messages[0].content[1]",
    ]


def test_a_developer_message_at_the_beginning_is_no_printed_list() -> None:
    """Gemma 4 writes the first message as text, later ones as parts: it showed the model
    "[{'type': 'text', ...}]"."""
    source = (
        "{% if messages[0].role in ['system', 'developer'] %}<|system|>"
        "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}"
        "{% else %}" + LISTS + "{% endif %}{% endfor %}"
    )
    found = template(source)
    assert found.probed.content_format == "parts"
    asked = [LATER[1], Message(role="user", content=PARTS), LATER[1]]
    talk = found.render(asked, add_generation_prompt=False)
    assert talk.text == "<|system|>two<|user|>a<image>b<|developer|>two"
