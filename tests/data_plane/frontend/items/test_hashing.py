"""Keys: no collisions, order independence, separation by tenant, options and processor."""

import base64
import itertools
import random
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveal_runtime.frontend.items.identify import Aliases
from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.protocol.body_text import Body, BodyText
from foveal_runtime.plan.errors import InvalidRequest, MediaConflict, MediaInvalid, MediaTooLarge
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire.item import view_item

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(), inner, max_size=4)
    ),
    max_leaves=8,
)


def same(a: object, b: object) -> bool:
    """Equality that tells True from 1 and 1 from 1.0, as the framing does."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and repr(a) == repr(b)


@given(VALUES, VALUES)
def test_frames_are_equal_exactly_for_equal_values(a, b):
    assert (hashing.frame(a) == hashing.frame(b)) == same(a, b)


@given(st.dictionaries(st.text(), SCALARS, min_size=1, max_size=6), st.randoms())
def test_key_order_does_not_matter(options, random):
    names = list(options)
    random.shuffle(names)
    assert hashing.frame({n: options[n] for n in names}) == hashing.frame(options)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (["ab", "c"], ["a", "bc"]),
        ([["a"], "b"], ["a", ["b"]]),
        ({"a": "b"}, ["a", "b"]),
        ("", None),
        ([], None),
        ([], {}),
        ("1", 1),
        (1, True),
        (1, 1.0),
        (b"a", "a"),
        ({"a": {"b": 1}}, {"a": ["b", 1]}),
        ({"size": {"height": 3}, "x": 1}, {"size": {"height": 3, "x": 1}}),
    ],
)
def test_structures_that_must_not_collide(a, b):
    assert hashing.frame(a) != hashing.frame(b)


def test_deep_and_foreign_options_are_refused():
    deep: dict = {}
    for _ in range(20):
        deep = {"a": deep}
    with pytest.raises(InvalidRequest):
        hashing.frame(deep)
    with pytest.raises(InvalidRequest):
        hashing.frame({"a": object()})


def test_every_part_of_the_key_counts():
    base = {"modality": 0, "identity": b"p", "options": {}, "salt": b""}
    variants = [
        {},
        {"modality": 1},
        {"identity": b"q"},
        {"options": {"a": 1}},
        {"salt": b"t"},
    ]
    keys = [hashing.mm_hash(b"d" * 32, **(base | change)) for change in variants]
    keys.append(hashing.mm_hash(b"e" * 32, **base))
    keys.append(hashing.injected_hash("d", namespace="n", identity=b"p"))
    assert all(len(key) == 32 for key in keys)
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_an_injectors_key_never_equals_a_content_key():
    digest = hashing.content_digest(b"x")
    content = hashing.mm_hash(digest, modality=0, identity=b"p", options={})
    assert hashing.injected_hash(digest.hex(), namespace="", identity=b"p") != content


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64",
        "data:image/png,abc",
        "data:image/png;base64,@@@@",
        "data:image/png;base64,abc=d",
        "data:image/png;base64,",
        "data:image/png;base64,a",
        "data:;base64,ä",
    ],
)
def test_broken_data_urls_are_clear_errors(url):
    with pytest.raises(MediaInvalid):
        hashing.decode_data_url(url, max_bytes=1000)


def test_data_urls_decode():
    data = bytes(range(256))
    for text in (
        base64.b64encode(data).decode(),
        base64.urlsafe_b64encode(data).decode(),
        base64.b64encode(data).decode().rstrip("="),
    ):
        assert hashing.decode_data_url(f"data:image/png;base64,{text}", max_bytes=256) == data


@pytest.mark.parametrize("size", [1, 56, 57, 256])
def test_base64_may_be_wrapped_or_escaped(size):
    """As base64(1) and encodebytes write it, and as it stands in a URL."""
    data = (b"\xff\xef" * 128)[:size]
    text = base64.b64encode(data).decode()
    wrapped = base64.encodebytes(data).decode()
    for one in (wrapped, wrapped.replace("\n", "\r\n"), quote(text, safe=""), quote(wrapped)):
        assert hashing.decode_data_url(f"data:image/png;base64,{one}", max_bytes=999) == data
    for broken in ("aGVs bG8h@", "aGVs%40bG8h", "%0A", " "):
        with pytest.raises(MediaInvalid):
            hashing.decode_data_url(f"data:image/png;base64,{broken}", max_bytes=256)


def test_long_texts_are_read_in_pieces(monkeypatch):
    data = bytes(range(256))
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    key = hashing.UrlTextMap.key(url + "ä\udc80")
    monkeypatch.setattr(hashing, "_PIECE_CHARS", 8)
    assert hashing.UrlTextMap.key(url + "ä\udc80") == key
    assert hashing.decode_data_url(url, max_bytes=256) == data
    with pytest.raises(MediaInvalid, match="padding before its end"):
        hashing.decode_data_url("data:;base64,AAAAAA==AAAA", max_bytes=256)


async def test_a_new_data_url_is_decoded_once(start_input, picture, data_url, monkeypatch):
    """For its hash; a worker gets the same bytes. Where the item is known they are not kept."""
    calls = []
    decode = hashing.decode_data_url
    monkeypatch.setattr(
        hashing, "decode_data_url", lambda *args, **named: calls.append(1) or decode(*args, **named)
    )
    inputs = await start_input()

    async def prepared(url):
        options = PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=1))
        request = await inputs.prepare([4], [MediaPart(modality="image", url=url)], options)
        return request.items[0]

    url = data_url(picture())
    first = await prepared(url)
    assert (len(calls), inputs.stats.processed_items[0]) == (1, 1)
    known = await prepared(url.replace("image/png", "image/webp"))  # another text, the same file
    assert known.mm_hash == first.mm_hash
    assert (len(calls), inputs.stats.processed_items[0]) == (2, 1)
    for item in (first, known):  # what is needed later is decoded again
        inputs.reset_cache()
        item.source._drop_retained()
        assert view_item(await item.source.value()).modality == "image"
    assert len(calls) == 4


def test_a_data_url_over_the_limit_is_refused_before_decoding():
    with pytest.raises(MediaTooLarge):
        hashing.decode_data_url("data:image/png;base64," + "!" * 10_000, max_bytes=100)


def test_url_texts_are_bounded_and_recent_ones_stay():
    texts = hashing.UrlTextMap(max_entries=2)
    a, b, c = (texts.key(name) for name in "abc")
    texts.commit(a, b"1", 1)
    texts.commit(b, b"2", 2)
    assert texts.lookup(a) == (b"1", 1)
    texts.commit(c, b"3", 3)
    assert texts.lookup(b) is None
    assert len(texts) == 2


def test_aliases_bind_once_per_tenant():
    aliases = Aliases(max_bindings=8, max_uuid_length=16)
    one = aliases.key("cat", b"t1", "image")
    other = aliases.key("cat", b"t2", "image")
    assert one != other
    assert one != aliases.key("cat", b"t1", "video")
    aliases.commit(one, b"1" * 32)
    aliases.check(one, b"1" * 32, "cat", "p")
    aliases.check(other, b"2" * 32, "cat", "p")
    with pytest.raises(MediaConflict, match="cat"):
        aliases.check(one, b"2" * 32, "cat", "p")
    aliases.check_integrity()


def test_announced_bindings_win_over_local_ones():
    announced = {b"a" * 32: b"9" * 32}
    aliases = Aliases(8, 16, announced.get)
    aliases.commit(b"a" * 32, b"1" * 32)
    assert aliases.lookup(b"a" * 32) == b"9" * 32


@pytest.mark.parametrize("uuid", ["", "x" * 17, "a\nb", "\x00"])
def test_bad_uuids_are_refused(uuid):
    with pytest.raises(InvalidRequest):
        Aliases(8, 16).key(uuid, b"", "image", "messages[0]")


def test_aliases_are_bounded():
    aliases = Aliases(max_bindings=3, max_uuid_length=16)
    for index in range(10):
        aliases.commit(bytes([index]) * 32, b"1" * 32)
    assert len(aliases) == 3
    aliases.check_integrity()


def standard(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def decoded(decode: Any, text: str) -> Any:
    try:
        return decode(text)
    except ValueError as error:
        return str(error)


def test_base64_is_what_the_standard_library_says() -> None:
    rng = random.Random(5)
    alphabet = "ABCDwxyz0189+/+/==\n -_é\x00"
    num_taken = 0
    for _ in range(60_000):
        text = "".join(rng.choices(alphabet[: rng.choice((14, 16, 18, 23))], k=rng.randrange(14)))
        expected, found = decoded(standard, text), decoded(hashing._decoded, text)
        assert found == expected, text
        num_taken += isinstance(found, bytes)
    assert num_taken > 3000


@pytest.mark.parametrize("written", ["lines", "escapes", "body"])
def test_line_breaks_and_escapes_are_no_bytes_of_media(written: str) -> None:
    """A file just below the limit was a 413 where its base64 had line breaks."""
    data = random.Random(1).randbytes(60_000)
    text: Any = base64.encodebytes(data).decode()
    if written != "lines":
        text = quote(text.replace("\n", ""), safe="")
    url: Any = f"data:image/png;base64,{text}"
    if written == "body":
        body = Body()
        assert body.add(url.encode())
        url = BodyText(body, 0, len(url))
    assert hashing.decode_data_url(url, max_bytes=len(data)) == data
    with pytest.raises(MediaTooLarge):
        hashing.decode_data_url(url, max_bytes=len(data) - 300)
