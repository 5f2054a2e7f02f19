"""Outputs that follow a grammar: every sampling mode, and state rebuilt from tokens alone."""

from __future__ import annotations

import contextlib
import json
import random
from dataclasses import dataclass, field, replace
from datetime import datetime
from fractions import Fraction

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import AddedToken

from foveal_runtime.frontend.grammars.schema import SchemaError
from foveal_runtime.frontend.grammars.worker import compile_job
from foveal_runtime.frontend.testing.fake_tokenizer import EOS, byte_tokenizer
from foveal_runtime.model.device import Device, open_device
from foveal_runtime.model.sampling import grammar as grammar_module
from foveal_runtime.model.sampling.grammar import Grammars, forbidden
from foveal_runtime.model.sampling.sampler import Sampler
from foveal_runtime.plan.budget.types import GRAMMAR_CACHE_BYTES, compiled_grammar_bytes
from foveal_runtime.plan.sampling import SamplingParams
from tests.support import packages, schema_suite

VOCAB = 263
MAX_TOKENS = 600


@dataclass
class Sequence:
    sampling: SamplingParams
    request_id: str = "r"
    prompt_token_ids: list[int] = field(default_factory=lambda: [1, 2])
    output_token_ids: list[int] = field(default_factory=list)
    scratch: dict[str, object] = field(default_factory=dict)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def sampler(model_path):
    return Sampler([EOS], Grammars(model_path, VOCAB, [EOS]))


def grammar_of(kind, source) -> str:
    return compile_job(kind, source, True)["grammar"]


def options(grammar, **more) -> SamplingParams:
    return SamplingParams(**{"max_tokens": MAX_TOKENS, "grammar": grammar, **more})


def random_logits(seed: int, index: int) -> torch.Tensor:
    """What a model with random weights says: a function of the position alone."""
    generator = torch.Generator().manual_seed(seed * 100_003 + index)
    return torch.randn(1, VOCAB, generator=generator) * 3


def draw(sampler, sequence, seed, until=MAX_TOKENS) -> bool:
    """Appends tokens as the runner would; whether the sequence ended."""
    outputs = sequence.output_token_ids
    while len(outputs) < until:
        found = sampler.sample(random_logits(seed, len(outputs)), [sequence])[0]
        outputs.append(found.token_id)
        if found.token_id == EOS:
            return True
    return False


def text_of(outputs) -> str:
    return bytes(t for t in outputs if t < 256).decode()


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_p": 0.5},
        {"temperature": 2.0, "top_k": 3, "min_p": 0.1},
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 2.0},
        {"temperature": 1.0, "logit_bias": ((300 % VOCAB, 100.0), (65, 100.0))},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 1.0, "min_tokens": MAX_TOKENS},
    ],
)
def test_every_sampling_mode_obeys(sampler, more):
    for seed in range(3):
        sequence = Sequence(options(grammar_of("json", PERSON), seed=seed, **more))
        assert draw(sampler, sequence, seed)
        jsonschema.validate(json.loads(text_of(sequence.output_token_ids)), PERSON)


def test_min_tokens_is_obeyed_where_the_grammar_lets_it(sampler):
    sequence = Sequence(options(grammar_of("regex", "[ab]{1,20}"), min_tokens=9, temperature=1.0))
    assert draw(sampler, sequence, 1)
    assert len(sequence.output_token_ids) > 9


def test_an_output_ends_as_soon_as_the_model_wants_and_the_grammar_allows(sampler):
    wants_end = torch.zeros(1, VOCAB)
    wants_end[0, EOS] = 9.0
    sequence = Sequence(options(grammar_of("regex", "[ab]{2,20}"), temperature=0))
    for _ in range(3):
        token = sampler.sample(wants_end, [sequence])[0].token_id
        sequence.output_token_ids.append(token)
    assert [token == EOS for token in sequence.output_token_ids] == [False, False, True]


def test_nothing_ends_within_reasoning_that_an_answer_must_follow(tmp_path):
    """Regression: reasoning may hold any token, the end among them: the model ended there, and a
    bound answer was empty text that "stop" called complete."""
    hf = byte_tokenizer()
    hf.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    hf.save_pretrained(tmp_path)
    marks = {mark: hf.convert_tokens_to_ids(mark) for mark in ("<think>", "</think>")}
    think = {"start": "<think>", "end": "</think>", "is_open": True, "budget": None}
    turn = {
        "format": "", "tools": [], "choice": "auto", "parallel": False, "think": think,
        "marks": marks, "is_bound": True, "answer": grammar_of("choice", ["yes"]),
    }  # fmt: skip
    sequence = Sequence(options(grammar_of("turn", turn)))
    grammars = Grammars(str(tmp_path), VOCAB + 2, [EOS])

    def allowed(outputs):
        words = grammars.words(sequence, sequence.sampling.grammar, outputs, 0)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        return set(np.flatnonzero(bits).tolist())

    thought, answer = list(b"hm"), list(b"yes")
    within = allowed(thought)
    assert EOS not in within
    assert {ord("a"), EOS + 1, marks["</think>"]} <= within
    assert allowed([*thought, marks["</think>"], *answer]) == {EOS}


@pytest.mark.parametrize(
    ("kind", "source", "allowed"),
    [
        ("choice", ["yes", 'n"o\n'], {"yes", 'n"o\n'}),
        ("regex", "[0-9]{2}", {f"{i:02}" for i in range(100)}),
        ("grammar", 'start: "a" B\nB: /b{2}/', {"abb"}),
        ("grammar", 'root ::= "x" | "y"', {"x", "y"}),
    ],
)
def test_other_kinds(sampler, kind, source, allowed):
    for seed in range(5):
        sequence = Sequence(options(grammar_of(kind, source), temperature=1.0, seed=seed))
        assert draw(sampler, sequence, seed)
        assert text_of(sequence.output_token_ids) in allowed


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("choice", ["<b>x</b>"], "<b>x</b>"),
        ("choice", ["<|end|>"], "<|end|>"),
        ("choice", ["a<image>"], "a<image>"),
        ("regex", "x</b><b></b>", "x</b><b></b>"),
        ("json", {"const": "<|end|><b>"}, '"<|end|><b>"'),
    ],
)
def test_names_of_added_tokens_are_spelt_where_the_text_holds_them(tmp_path, kind, source, text):
    """The token itself was the only one allowed, and did not follow the grammar, or ended it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<b>"), AddedToken("</b>", special=True)])
    tokenizer.save_pretrained(tmp_path)
    bound = Sampler([EOS], Grammars(str(tmp_path), len(tokenizer), [EOS]))
    sequence = Sequence(options(grammar_of(kind, source), temperature=0.0))
    for _ in range(20):
        failed: dict[str, str] = {}
        [found] = bound.sample(torch.zeros(1, len(tokenizer)), [sequence], failed)
        assert not failed
        if found.token_id == EOS:
            break
        sequence.output_token_ids.append(found.token_id)
    assert text_of(sequence.output_token_ids) == text


def test_structural_tags_bind_what_follows_a_trigger(sampler):
    tag = {"begin": "<f>", "schema": {"const": 7}, "end": "</f>"}
    grammar = grammar_of("structural_tag", {"structures": [tag], "triggers": ["<f"]})
    sequence = Sequence(options(grammar, temperature=1.0))
    sequence.output_token_ids += b"free <f"
    draw(sampler, sequence, 0, until=len(b"free <f>7</f>"))
    assert text_of(sequence.output_token_ids) == "free <f>7</f>"


def test_state_is_rebuilt_from_the_tokens(model_path):
    """Preemption, another engine and another rank know the tokens and nothing else: whatever the
    place of the cut, the text goes on as it would have."""
    grammar = grammar_of("json", PERSON)
    params = options(grammar, temperature=1.5, seed=5)
    whole = Sequence(params)
    assert draw(Sampler([EOS], Grammars(model_path, VOCAB, [EOS])), whole, 5)
    for cut in range(len(whole.output_token_ids)):
        again = Sequence(params, output_token_ids=whole.output_token_ids[:cut])
        assert draw(Sampler([EOS], Grammars(model_path, VOCAB, [EOS])), again, 5)
        assert again.output_token_ids == whole.output_token_ids, cut


@pytest.mark.parametrize("more", [{"temperature": 0.0}, {"seed": 5}, {"repetition_penalty": 1.3}])
def test_guesses_change_no_output(sampler, more):
    """Right ones, wrong ones, and ones that the grammar does not allow. What was consumed of a
    wrong one is taken back."""
    rng, room, num_right = random.Random(5), open_device(torch.device("cpu")), 0
    for seed in range(8):
        usual = Sequence(options(grammar_of("json", PERSON), **more))
        draw(sampler, usual, seed)
        wanted, sequence = usual.output_token_ids, replace(usual, output_token_ids=[], scratch={})
        while len(outputs := sequence.output_token_ids) < len(wanted):
            right = wanted[len(outputs) :][: rng.randint(0, 4)]
            draft = [one if rng.random() < 0.7 else rng.randrange(256) for one in right]
            rows = [sequence]
            rows += [replace(sequence, output_token_ids=outputs + draft[: n + 1])
                     for n in range(len(draft))]  # fmt: skip
            logits = [random_logits(seed, len(row.output_token_ids)) for row in rows]
            found = sampler.launch(torch.cat(logits), rows, room, [None, *draft])
            failed: dict[str, str] = {}
            drawn = found.finish(room.fetch(found.tensors).wait(), failed)
            assert not failed
            num_right += len(drawn) - 1
            outputs += [one.token_id for one in drawn][: len(wanted) - len(outputs)]
        assert outputs == wanted
    assert num_right > 50


def test_a_broken_grammar_fails_its_request_alone(sampler):
    good = Sequence(options(grammar_of("choice", ["a"]), temperature=0.0), "good")
    bad = Sequence(options("start: x", temperature=0.0), "bad")
    astray = Sequence(good.sampling, "astray", output_token_ids=[66])
    failed: dict[str, str] = {}
    logits = random_logits(0, 0).expand(3, -1)
    found = sampler.sample(logits, [bad, good, astray], failed)
    assert [one.token_id for one in found] == [ord("a")]
    assert set(failed) == {"bad", "astray"}


def test_a_sampler_without_grammars_refuses(sampler):
    failed: dict[str, str] = {}
    Sampler([EOS]).sample(random_logits(0, 0), [Sequence(options("start: x"))], failed)
    assert "binds no output" in failed["r"]


def test_the_cache_of_grammars_is_bounded(model_path, monkeypatch):
    grammars = Grammars(model_path, VOCAB, [EOS])
    for number in range(300):
        bound = Sequence(options(""))
        grammars.words(bound, LLMatcher.grammar_from_lark(f'start: "{number}"'), [], 0)
    assert grammars.stats.num_cached <= 256
    assert 0 < grammars.stats.cached_bytes <= GRAMMAR_CACHE_BYTES
    monkeypatch.setattr(grammar_module, "GRAMMAR_CACHE_BYTES", 3 * 4096)
    for number in range(3):
        last = LLMatcher.grammar_from_lark(f'start: "x{number}"')
        grammars.words(Sequence(options("")), last, [], 0)
    assert grammars.stats.num_cached == 2  # each takes 4 KiB and its text
    assert grammars.stats.cached_bytes <= 3 * 4096


NAMES = ["date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "made-up"]


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    simple = [
        lambda: {"type": "integer", "minimum": -5, "maximum": rng.randint(-5, 99)},
        lambda: {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
        lambda: {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 6)},
        lambda: {"type": "string", "pattern": "^[a-c]{1,4}$"},
        lambda: {"type": "string", "format": rng.choice(NAMES)},
        lambda: {"type": "boolean"},
        lambda: {"type": ["null", "boolean"]},
        lambda: {"enum": ["x", 1, None, {"a": [1]}][: rng.randint(1, 4)]},
        lambda: {"const": rng.choice([3, "c", [1, 2]])},
    ]
    nested = [
        lambda: {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": 2},
        lambda: {"anyOf": [random_schema(rng, depth + 1), random_schema(rng, depth + 1)]},
        lambda: _object(rng, depth),
        lambda: _object(rng, depth),
    ]
    return rng.choice(simple if depth > 2 else simple + nested * 3)()


def _object(rng: random.Random, depth: int) -> dict:
    names = rng.sample(["id", "ä", "a b", 'q"', "list"], rng.randint(0, 3))
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


FORMATS = jsonschema.FormatChecker(["date", "uuid", "email", "ipv4", "ipv6"])


@FORMATS.checks("date-time", ValueError)
def _is_date_time(value: object) -> bool:
    if isinstance(value, str):
        assert datetime.fromisoformat(value.upper()).tzinfo is not None
    return True


@FORMATS.checks("time", ValueError)
def _is_time(value: object) -> bool:
    return _is_date_time(f"2000-01-01T{value}" if isinstance(value, str) else value)


class Spelt(float):
    """A number with its own spelling, which may have more digits than a float has."""

    def __init__(self, text: str) -> None:
        self.text = text


def _is_multiple(validator, factor, value, schema):
    """jsonschema divides floats, to which 51.8336 is no multiple of 0.0001."""
    if validator.is_type(value, "number"):
        quotient = Fraction(getattr(value, "text", str(value))) / Fraction(str(factor))
        if quotient.denominator != 1:
            yield jsonschema.ValidationError(f"{value} is no multiple of {factor}")


def check(schema, text: str) -> None:
    """Raises ValidationError for JSON that the schema does not allow."""
    kind = jsonschema.validators.validator_for(schema)
    exact = jsonschema.validators.extend(kind, {"multipleOf": _is_multiple})
    exact(schema, format_checker=FORMATS).validate(json.loads(text, parse_float=Spelt))


@pytest.mark.parametrize(
    ("factor", "text", "is_multiple"),
    [
        (0.0001, "51.8336", True), (0.01, "0.07", True), (3, "9.0", True),
        (1.5, "300000000000000000000001.5", True), (1.5, "300000000000000000000001.4", False),
        (0.0001, "51.83365", False), (2, "3", False),
    ],
)  # fmt: skip
def test_the_checker_divides_exactly(factor, text, is_multiple):
    with contextlib.nullcontext() if is_multiple else pytest.raises(jsonschema.ValidationError):
        check({"multipleOf": factor}, text)


def check_sound(sampler, schemas: list) -> None:
    """A finished answer validates, whatever the model wants to say, at every temperature."""
    num_finished = 0
    for seed, schema in enumerate(schemas):
        grammar = grammar_of("json", schema)
        for temperature in (0.0, 1.0, 2.0):
            params = options(grammar, temperature=temperature, seed=seed, top_p=0.9)
            sequence = Sequence(params)
            if draw(sampler, sequence, seed):
                num_finished += 1
                check(schema, text_of(sequence.output_token_ids))
    assert num_finished > 0.9 * 3 * len(schemas)


COUNTS = [
    pytest.param(100, marks=pytest.mark.extended),
    pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
]


@pytest.mark.parametrize("count", COUNTS)
def test_generated_schemas_are_obeyed(sampler, count):
    check_sound(sampler, [random_schema(random.Random(seed)) for seed in range(count)])


@pytest.mark.parametrize("count", COUNTS)
def test_schemas_of_the_official_suite_are_obeyed(sampler, count):
    """Those that are served; `test_schema_suite` holds how many they are."""
    suite = packages.or_skip(lambda: [schema_suite.cases(draft) for draft in schema_suite.DRAFTS])
    cases = [case for draft in suite for case in draft]
    served = []
    for case in random.Random(5).sample(cases, min(2 * count, len(cases))):
        with contextlib.suppress(SchemaError):
            grammar_of("json", case.schema)
            served.append(case.schema)
    assert len(served) >= min(count, 400)
    check_sound(sampler, served[:count])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 850, 1000])
def test_masks_are_unpacked_alike_on_every_device(vocab_size):
    """The CPU has a way of its own, which is faster there."""
    drawn = np.random.default_rng(vocab_size)
    words = drawn.integers(-(2**31), 2**31, (5, -(-vocab_size // 32)), dtype=np.int64)
    words = words.astype(np.int32)
    cpu = open_device(torch.device("cpu"))
    shifted = Device(torch.device("meta"))
    shifted.upload = cpu.upload  # arrays of this machine, as another device would have them
    expected = [
        [not words[row, token // 32] >> token % 32 & 1 for token in range(vocab_size)]
        for row in range(len(words))
    ]
    for device in (cpu, shifted):
        assert forbidden(words, vocab_size, device).tolist() == expected


def test_what_grammars_cost_is_counted(model_path):
    grammars = Grammars(model_path, VOCAB, [EOS])
    grammar = grammar_of("json", {"enum": ["a", "b"]})
    one, other = Sequence(options(grammar)), Sequence(options(grammar))
    for sequence in (one, one, other):
        grammars.words(sequence, grammar, [], 0)
    stats = grammars.stats
    assert (stats.num_lookups, stats.num_hits, stats.num_cached) == (2, 1, 1)
    assert stats.cached_bytes == compiled_grammar_bytes(grammar)
    assert stats.compile_seconds > 0
    assert stats.mask_seconds > 0
