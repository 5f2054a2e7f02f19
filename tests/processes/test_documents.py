"""PDFs against real processes: a scene on a page is seen as the same scene in an image is."""

from __future__ import annotations

import base64
import io

import pytest
from evaluate import to_request
from PIL import Image

from tests.support.pdf_files import pdf_of

pytestmark = pytest.mark.timeout(900)


def image_of(part):
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    return Image.open(io.BytesIO(data)).convert("RGB")


@pytest.fixture
def asked(samples):
    """(sample, its text, its only picture)"""
    for sample in samples:
        content = to_request(sample, "tiny-vlm")["messages"][-1]["content"]
        if len(sample.pictures) == 1 and isinstance(content, list):
            pictures = [image_of(part) for part in content if part["type"] != "text"]
            if pictures and len(sample.messages) == 1:
                text = "".join(part["text"] for part in content if part["type"] == "text")
                return sample, text, pictures[0]
    raise AssertionError("no sample of one turn and one picture")


def url_of(*pages, note=""):
    return "data:application/pdf;base64," + base64.b64encode(pdf_of(pages, note)).decode()


def test_a_page_is_seen_by_every_api(shared, asked, longest_reply):
    sample, text, picture = asked
    asker = shared[1]
    document = url_of(picture, note="every api")
    common = {"model": "tiny-vlm", "temperature": 0}

    def ask(path, body):
        answer = asker.http.post(path, json={**common, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    part = {"type": "file", "file": {"filename": "a.pdf", "file_data": document}}
    words = {"type": "text", "text": text}
    chat = ask("/v1/chat/completions", {
        "messages": [{"role": "user", "content": [part, words]}], "max_tokens": longest_reply,
    })  # fmt: skip
    assert chat["choices"][0]["message"]["content"] == sample.reference

    before = asker.metric("foveal_media_items_processed_total")
    part = {"type": "input_file", "filename": "a.pdf", "file_data": document}
    response = ask("/v1/responses", {
        "input": [{"role": "user", "content": [part, {"type": "input_text", "text": text}]}],
        "max_output_tokens": longest_reply,
    })  # fmt: skip
    assert response["output"][0]["content"][0]["text"] == sample.reference

    source = {"type": "base64", "media_type": "application/pdf", "data": document.partition(",")[2]}
    message = ask("/v1/messages", {
        "messages": [{"role": "user", "content": [{"type": "document", "source": source}, words]}],
        "max_tokens": longest_reply,
    })  # fmt: skip
    assert message["content"][0]["text"] == sample.reference
    assert message["usage"]["cache_read_input_tokens"] > 0
    assert asker.metric("foveal_media_items_processed_total") == before


def test_a_page_of_another_document_hits_every_cache(shared, asked, longest_reply):
    """The page is known by what it shows, not by the file that it came in."""
    sample, text, picture = asked
    asker = shared[1]

    def ask(document):
        part = {"type": "file", "file": {"file_data": document}}
        content = [part, {"type": "text", "text": text}]
        body = {
            "model": "tiny-vlm", "temperature": 0, "max_tokens": longest_reply,
            "messages": [{"role": "user", "content": content}],
        }  # fmt: skip
        answer = asker.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    ask(url_of(picture, note="one"))
    before = asker.metric("foveal_media_items_processed_total")
    answer = ask(url_of(picture, note="two"))
    assert answer["choices"][0]["message"]["content"] == sample.reference
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert asker.metric("foveal_media_items_processed_total") == before


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"%PDF-1.7 broken", "cannot be read"), (b"GIF89a", "it is no PDF")],
)
def test_a_broken_document_is_the_request_s_error(shared, data, says):
    url = "data:application/pdf;base64," + base64.b64encode(data).decode()
    part = {"type": "file", "file": {"file_data": url}}
    body = {"model": "tiny-vlm", "messages": [{"role": "user", "content": [part]}]}
    answer = shared[1].http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].file.file_data"
    assert says in answer.json()["error"]["message"]
