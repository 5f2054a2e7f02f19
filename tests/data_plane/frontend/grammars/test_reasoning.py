"""Reasoning apart from the answer: never in a call, in text or in JSON, however it is cut."""

from __future__ import annotations

import json
import random

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken

from foveal_runtime.frontend.grammars.formats import FORMATS, THINKING, render_calls
from foveal_runtime.frontend.grammars.reader import Reader, TurnFormat
from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer
from foveal_runtime.frontend.text.detokenizer import Detokenizer
from foveal_runtime.frontend.text.tokenizer import TextTokenizer

THINK = ("<think>", "</think>")
SCHEMAS = {"look": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL = render_calls(FORMATS["hermes"], [("look", {"at": "</think>"})], SCHEMAS)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def tokenizer(request):
    hf = byte_tokenizer()
    if request.param:
        hf.add_tokens([AddedToken(m) for m in (*THINK, "<tool_call>", "</tool_call>")])
    return TextTokenizer(hf)


def matcher_of(tokenizer, turn, *, choice="auto", answer="", budget=None):
    tools = [{"name": n, "parameters": s, "strict": True} for n, s in turn.schemas.items()]
    think = {"start": THINK[0], "end": THINK[1], "is_open": turn.is_thinking, "budget": budget}
    source = {
        "format": turn.row.name if turn.row else "", "tools": tools, "choice": choice,
        "parallel": True, "think": think, "marks": dict(turn.marks), "is_bound": bool(answer),
        "answer": answer,
    }  # fmt: skip
    grammar = compile_job("turn", json.loads(json.dumps(source)), True)["grammar"]
    library = LLTokenizer(
        tokenizer.hf.backend_tokenizer.to_str(), n_vocab=tokenizer.vocab_size, eos_token=[EOS]
    )
    matcher = LLMatcher(library, grammar, log_level=0)
    assert not matcher.get_error(), matcher.get_error()
    return matcher


def turn_of(tokenizer, row=None, is_thinking=True):
    text = (row.literals if row else "") + " ".join(THINK)
    return TurnFormat(row, SCHEMAS if row else {}, THINK, is_thinking, tokenizer.marks(text))


def accepts(tokenizer, matcher, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return all(matcher.consume_token(token) for token in tokens) and matcher.is_accepting()


def parts(turn, text, rng):
    """(reasoning, content, arguments) of a text in random pieces."""
    text = turn.encoded(text)
    at = sorted(rng.sample(range(len(text) + 1), min(6, len(text))))
    reader = Reader(turn, "r")
    content = ""
    for a, b in zip([0, *at], [*at, len(text)], strict=True):
        content += reader.push(text[a:b])
    content += reader.finish()
    reasoning, calls, _ = reader.take()
    return reasoning, content, "".join(one.arguments for one in calls)


@pytest.mark.parametrize("is_thinking", [True, False])
def test_reasoning_text_and_call_are_told_apart(tokenizer, is_thinking):
    rng = random.Random(1)
    turn = turn_of(tokenizer, FORMATS["hermes"], is_thinking)
    begin = "" if is_thinking else "<think>"
    call_text = CALL.replace("</think>", "<br>") if turn.marks else CALL
    for thought, text, call in (
        ('a {"b"} [', "Well: x < y.", call_text), ("t", "", call_text), ("", "only text", ""),
    ):  # fmt: skip
        whole = f"{begin}{thought}</think>\n\n{text}\n{call}".rstrip()
        assert accepts(tokenizer, matcher_of(tokenizer, turn), whole), whole
        for _ in range(20):
            reasoning, content, arguments = parts(turn, whole, rng)
            assert (reasoning, content) == (thought, text)
            assert bool(arguments) == bool(call)
    if not is_thinking:
        assert accepts(tokenizer, matcher_of(tokenizer, turn), "No thought <b>.")
        assert parts(turn, "No thought <b>.", rng) == ("", "No thought <b>.", "")


def test_json_begins_after_the_reasoning(tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    answer = compile_job("json", schema, True)["grammar"]
    turn = turn_of(tokenizer)
    whole = 'it is "{" so</think>\n\n{"a": "x<y"}'
    assert accepts(tokenizer, matcher_of(tokenizer, turn, answer=answer), whole)
    assert not accepts(tokenizer, matcher_of(tokenizer, turn, answer=answer), "so</think>text")
    assert not accepts(tokenizer, matcher_of(tokenizer, turn, answer=answer), '{"a": "x"}')
    rng = random.Random(2)
    for _ in range(20):
        assert parts(turn, whole, rng) == ('it is "{" so', '{"a": "x<y"}', "")
    closed = turn_of(tokenizer, is_thinking=False)
    assert accepts(tokenizer, matcher_of(tokenizer, closed, answer=answer), '{"a": "x"}')


def test_required_calls_come_after_the_reasoning(tokenizer):
    turn = turn_of(tokenizer, FORMATS["hermes"])
    call = CALL.replace("</think>", "here")
    matcher = matcher_of(tokenizer, turn, choice="required")
    assert accepts(tokenizer, matcher, f"first I look</think>\n{call}")
    matcher = matcher_of(tokenizer, turn, choice="required")
    assert not accepts(tokenizer, matcher, "first I look</think>\ntext")


def test_a_budget_ends_the_reasoning():
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken(m) for m in THINK])
    tokenizer = TextTokenizer(hf)
    turn = turn_of(tokenizer)
    end = turn.marks["</think>"]
    for budget in (0, 3):
        matcher = matcher_of(tokenizer, turn, budget=budget)
        for _ in range(budget):
            assert matcher.consume_token(ord("a"))
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        assert [i for i in range(tokenizer.vocab_size) if bits >> i & 1] == [end]
        again = matcher_of(tokenizer, turn, budget=budget)
        assert again.consume_tokens([ord("a")] * budget + [end, ord("b")])


def test_reasoning_that_is_cut_off_is_reasoning():
    for _, end in THINKING:
        turn = TurnFormat(None, {}, ("<x>", end), True, {})
        reader = Reader(turn, "r")
        assert reader.push("a thought" + end[:-1]) + reader.finish() == ""
        assert reader.take()[0] == "a thought" + end[:-1]


def test_choices_share_what_is_read_for(tokenizer):
    """Each of n choices encoded the opening of every tool again."""
    turn = turn_of(tokenizer, FORMATS["hermes"])
    assert Reader(turn, "a")._first is Reader(turn, "b")._first


def test_the_end_of_the_output_is_no_token_of_reasoning(tokenizer):
    detokenizer = Detokenizer(tokenizer, turn=turn_of(tokenizer))
    detokenizer.push(list(b"hmm"))
    detokenizer.finish()
    assert detokenizer.take()[2] == 3


def test_text_held_for_a_stop_string_leaves_before_the_call(tokenizer):
    turn = turn_of(tokenizer, FORMATS["hermes"])
    call = CALL.replace("</think>", "here")
    detokenizer = Detokenizer(tokenizer, turn=turn, stops=["Well, no"])
    tokens = tokenizer.encode(f"t</think>Well{call}", add_special_tokens=False)
    text = ""
    for token in tokens:
        text += detokenizer.push([token]).text
        if detokenizer.take()[1]:
            break
    assert text == "Well"
    assert detokenizer.finish().text == ""
