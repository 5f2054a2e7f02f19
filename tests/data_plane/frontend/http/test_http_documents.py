"""Documents as chat, Responses and Messages write them: one image for each page."""

from __future__ import annotations

from typing import Any

import pytest

PDF = "data:application/pdf;base64,JVBERg=="
IMAGES = "<image><image>"
TEXT = {"type": "text", "text": "x"}


def file_part(**given: Any) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": "a.pdf", **given}}


@pytest.mark.parametrize(
    "part",
    [
        file_part(file_data=PDF),
        file_part(file_data="JVBERg=="),
        {"type": "input_file", "filename": "a.pdf", "file_data": PDF},
    ],
    ids=["url", "bare", "input_file"],
)
async def test_pages_stand_where_the_file_does(harness: Any, part: dict[str, Any]) -> None:
    answer = await harness.chat([{"type": "text", "text": "a"}, part, TEXT])
    assert answer.status_code == 200, answer.text
    assert harness.prompt.count("<image>") == 2
    assert f"a{IMAGES}x" in harness.prompt.replace("\n", "")
    [document] = harness.processor.documents
    assert (document.url, document.path.partition("]")[0]) == (PDF, "messages[0")
    parts, _ = harness.processor.seen[-1]
    assert [part.page.page for part in parts] == [0, 1]
    assert {part.path for part in parts} == {"messages[0].content[1]"}


async def test_documents_keep_their_place_among_images(harness: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    more = file_part(file_data="http://example.test/b.pdf")
    answer = await harness.chat([file_part(file_data=PDF), image, more])
    assert answer.status_code == 200, answer.text
    parts, _ = harness.processor.seen[-1]
    assert [part.page is None for part in parts] == [False, False, True, False, False]
    assert [document.url for document in harness.processor.documents][1] == more["file"][
        "file_data"
    ]


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        (file_part(file_id="file-1"), "file.file_id", "this one keeps none"),
        (file_part(), "file.file_data", "is missing"),
        (file_part(file_data="data:text/csv;base64,YQ=="), "file.file_data", "is text/csv; only"),
        ({"type": "input_file", "file_id": "file-1"}, "file_id", "this one keeps none"),
        ({"type": "input_file"}, "file_data", "is missing"),
    ],
)
async def test_what_cannot_be_read_is_refused_by_name(
    harness: Any, part: dict[str, Any], param: str, says: str
) -> None:
    answer = await harness.chat([TEXT, part])
    error = answer.json()["error"]
    assert answer.status_code in (400, 422), answer.text
    assert error["param"] == f"messages[0].content[1].{param}"
    assert says in error["message"]
    assert not harness.generator.requests


async def test_tokens_of_documents_are_counted(harness: Any) -> None:
    body = {"messages": [{"role": "user", "content": [file_part(file_data=PDF)]}]}
    answer = await harness.http.post("/tokenize", json={**body, "expand_media": False})
    assert answer.status_code == 200, answer.text
    assert len(harness.processor.documents) == 1


async def test_responses_take_files(harness: Any) -> None:
    part = {"type": "input_file", "file_url": "https://example.test/a.pdf"}
    items = [
        {"role": "user", "content": [part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [{"type": "input_file", "file_data": PDF}],
        },
    ]
    answer = await harness.http.post("/v1/responses", json={"model": "tiny", "input": items})
    assert answer.status_code == 200, answer.text
    assert harness.prompt.count("<image>") == 4
    assert [d.url for d in harness.processor.documents] == [part["file_url"], PDF]


def document(**source: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, "cache_control": {"type": "ephemeral"}}


async def messages(harness: Any, *blocks: dict[str, Any], before: Any = ()) -> Any:
    turn = {"role": "user", "content": list(blocks)}
    body = {"model": "tiny", "max_tokens": 8, "messages": [*before, turn]}
    return await harness.http.post("/v1/messages", json=body)


async def test_messages_take_documents(harness: Any) -> None:
    pdf = document(type="base64", media_type="application/pdf", data="JVBERg==")
    blocks = [
        {**pdf, "title": "T", "context": "C", "citations": {"enabled": False}},
        document(type="url", url="https://example.test/a.pdf"),
        document(type="text", media_type="text/plain", data="plain words"),
        document(type="content", content=[TEXT]),
        {"type": "tool_result", "tool_use_id": "t", "content": [pdf]},
    ]
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    before = [{"role": "user", "content": "q"}, {"role": "assistant", "content": [call]}]
    answer = await messages(harness, *blocks, before=before)
    assert answer.status_code == 200, answer.text
    prompt = harness.prompt.replace("\n", "")
    assert f"TC{IMAGES}{IMAGES}plain wordsx" in prompt
    assert prompt.count("<image>") == 6
    assert PDF in [document.url for document in harness.processor.documents]


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"type": "file", "file_id": "f"}, "messages[0].content[0].source"),
        ({"type": "base64"}, "messages[0].content[0].source.data"),
        ({"type": "url"}, "messages[0].content[0].source.url"),
    ],
)
async def test_messages_refuse_documents_by_name(
    harness: Any, source: dict[str, Any], param: str
) -> None:
    answer = await messages(harness, document(**source))
    assert answer.status_code in (400, 422)
    assert answer.json()["type"] == "error"
    assert param in answer.json()["error"]["message"]


PIXEL = "data:image/png;base64,iVBORw0KGgo="
IMAGE = {"type": "image_url", "image_url": {"url": PIXEL}}
CONTENT = [file_part(file_data=PDF), IMAGE]
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": CONTENT}]}),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}]},
        ),
        (
            "/v1/responses",
            {
                "truncation": "auto",
                "input": [
                    {"role": "user", "content": [{"type": "input_image", "image_url": PIXEL}]},
                    {"role": "assistant", "content": "one"},
                    {"role": "user", "content": "two"},
                ],
            },
        ),
    ],
)
async def test_a_salt_holds_where_a_prompt_is_counted(
    harness: Any, path: str, body: dict[str, Any]
) -> None:
    """The media were processed without it, into the caches that clients without a salt share."""
    answer = await harness.http.post(path, json={"model": "tiny", **body, "cache_salt": "a"})
    assert answer.status_code == 200, answer.text
    assert {options.cache_salt for _, options in harness.processor.seen} == {"a"}
    wrong = await harness.http.post(path, json={"model": "tiny", **body, "cache_salt": "a@b"})
    assert (wrong.status_code, "cache_salt" in wrong.text) == (400, True)
