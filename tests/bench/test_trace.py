"""Traces are what their names say, the same in every run, and strangers to each other."""

import itertools

import pytest

from foveal_runtime.bench.images import ImageKind, draw
from foveal_runtime.bench.traces import KINDS, make_trace, poisson_starts


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_trace(kind):
    assert make_trace(kind, 3, 40) == make_trace(kind, 3, 40)


@pytest.mark.parametrize("kind", KINDS)
def test_other_seeds_share_neither_pictures_nor_texts(kind):
    """Rounds differ by seed: what a server remembers of one must not help it in the next."""
    one, other = make_trace(kind, 3, 40), make_trace(kind, 4, 40)
    assert not set(one.images) & set(other.images)
    texts = [{turn.text for turns in t.conversations for turn in turns} for t in (one, other)]
    assert not texts[0] & texts[1]


def test_kinds_share_no_pictures():
    for one, other in itertools.combinations(KINDS, 2):
        assert not set(make_trace(one, 1, 40).images) & set(make_trace(other, 1, 40).images)


@pytest.mark.parametrize("percent", [0, 30, 70, 95])
@pytest.mark.parametrize("num", [20, 60, 200])
def test_hit_traces_have_their_hit_rate(percent, num):
    trace = make_trace(f"hits-{percent}", 1, num)
    assert trace.num_requests == num
    assert trace.hit_rate == pytest.approx(percent / 100, abs=0.5 / num)


def test_the_grouped_trace_has_350_pictures_for_500_prompts():
    trace = make_trace("grouped", 1)
    assert trace.num_requests == 500
    assert len(trace.images) == 350
    turns = [turns[0] for turns in trace.conversations]
    repeats = sum(a == b for a, b in itertools.pairwise(turns))
    assert repeats == 150, "a repeat stands right after what it repeats"
    assert len(set(turns)) == 350


def test_conversations_show_their_picture_once():
    trace = make_trace("multi-turn", 1, 24)
    assert [len(turns) for turns in trace.conversations] == [3] * 8
    assert all([len(t.images) for t in turns] == [1, 0, 0] for turns in trace.conversations)


def test_several_pictures_in_a_prompt_are_distinct():
    trace = make_trace("several", 1, 24)
    shown = [turns[0].images for turns in trace.conversations]
    assert all(len(set(pictures)) == 3 for pictures in shown)
    assert trace.hit_rate > 0.5


def test_long_text_is_long():
    def words(kind):
        return len(make_trace(kind, 1, 1, num_words=20).conversations[0][0].text.split())

    assert (words("text"), words("long-text")) == (20, 200)


def test_poisson_arrivals_have_their_rate():
    starts = poisson_starts(1, 4000, 8.0)
    assert starts == sorted(starts) == poisson_starts(1, 4000, 8.0)
    assert 4000 / starts[-1] == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize("text", ["32x24", "32x24.png", "40x40.jpeg"])
def test_pictures_are_the_same_in_every_run(text):
    kind = ImageKind.parse(text)
    assert draw(7, kind) == draw(7, kind) != draw(8, kind)


def test_a_picture_kind_is_checked():
    with pytest.raises(ValueError, match="format"):
        ImageKind.parse("3x4.gif")
