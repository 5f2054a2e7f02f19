"""POST /v1/audio/transcriptions and translations: openai's package and raw forms, over HTTP."""

from __future__ import annotations

import json

import openai
import pytest

from foveal_runtime.frontend.protocol.transcription import FAMILIES, read_form
from foveal_runtime.frontend.testing.fake_tokenizer import AUDIO, byte_tokenizer
from foveal_runtime.plan.config import ModelConfig
from foveal_runtime.plan.errors import InvalidRequest

PATH = "/v1/audio/transcriptions"
SOUND = b"RIFF\x00\x01\r\n--not the boundary\r\n\x02\xff"
FILE = {"file": ("clip.wav", SOUND, "audio/wav")}
TOKENIZER = byte_tokenizer()


@pytest.fixture
async def client(harness):
    url = harness.url + "/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture
def family(start, tmp_path):
    """A server of a checkpoint of such a model type."""

    def run(name: str):
        TOKENIZER.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        return start(model=ModelConfig(path=str(tmp_path), name="tiny"))

    return run


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # the package's translations
async def test_the_package_gets_the_text(harness, client) -> None:
    for method in (client.audio.transcriptions.create, client.audio.translations.create):
        found = await method(model="tiny", file=("clip.wav", SOUND))
        assert found.text == "Hello, world!"
        assert found.usage
        assert harness.prompt.count(TOKENIZER.decode([AUDIO])) == 1
    [part] = harness.processor.seen[0][0]
    assert part.modality == "audio"
    assert part.url.startswith("data:audio/wav;base64,")
    assert "Transcribe the speech" in TOKENIZER.decode(harness.generator.requests[0].token_ids)
    assert "into English" in harness.prompt
    assert harness.generator.requests[0].sampling.temperature == 0


async def test_as_text_and_as_a_stream(harness, client) -> None:
    text = await client.audio.transcriptions.create(
        model="tiny", file=("a.mp3", SOUND), response_format="text", temperature=0.5,
        language="de-AT", prompt="Foveal",
    )  # fmt: skip
    assert text == "Hello, world!"
    assert "The speech is in German.\nFoveal" in harness.prompt
    assert harness.generator.requests[-1].sampling.temperature == 0.5
    stream = await client.audio.transcriptions.create(
        model="tiny", file=("a.mp3", SOUND), stream=True
    )
    events = [event async for event in stream]
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(event.delta for event in events[:-1]) == "Hello, world!" == events[-1].text
    assert events[-1].type == "transcript.text.done"


async def test_a_salt_keeps_audio_apart(start) -> None:
    """It was an unknown field: refused, or where those are ignored, without effect."""
    async with start(ignore_unknown_options=True) as harness:
        for salt, status in (("a", 200), ("a@b", 400), ("a" * 129, 400)):
            found = await harness.http.post(PATH, files=FILE, data={"cache_salt": salt})
            assert found.status_code == status, found.text
            assert status == 200 or found.json()["error"]["param"] == "cache_salt"
        [(_, options)] = harness.processor.seen
        assert options.cache_salt == "a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "srt"}, "response_format"),
        ({"response_format": "vtt"}, "response_format"),
        ({"response_format": "verbose_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include"),
        ({"language": "klingon"}, "language"),
        ({"temperature": "warm"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"known_speaker_names": "x"}, "known_speaker_names"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(harness, fields, param) -> None:
    answer = await harness.http.post(PATH, data={"model": "tiny", **fields}, files=FILE)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not harness.generator.requests


async def test_forms_that_are_none(harness) -> None:
    for more in (
        {"json": {"file": "x"}},
        {"data": {"model": "tiny"}},
        {"files": {"file": ("a.wav", b"")}},
        {"content": b"--x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
        {"content": b"--y\r\n", "headers": {"content-type": "multipart/form-data; boundary=y"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data"}},
    ):
        answer = await harness.http.post(PATH, **more)
        assert answer.status_code == 400, answer.text
    wrong = await harness.http.post(PATH, data={"model": "other"}, files=FILE)
    assert wrong.status_code == 404


def test_a_form_is_read_to_the_byte() -> None:
    head = "multipart/form-data; boundary=b"
    body = (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\ntiny\r\n'
        b'--b\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n'
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.flac"\r\n'
        b"Content-Type: audio/flac\r\n\r\n" + SOUND + b"\r\n--b--\r\n"
    )
    fields, file = read_form(head, body)
    assert fields == {"model": "tiny", "empty": ""}
    assert (file.name, file.content_type, bytes(file.data)) == ("a.flac", "audio/flac", SOUND)
    for preamble in (b"\r\n", b"For readers without MIME.\r\n", b"-- b --b?\r\n\r\n"):
        assert read_form(head, preamble + body) == (fields, file)
    for cut in range(len(body) - 8):
        with pytest.raises(InvalidRequest):
            read_form(head, body[:cut])
    many = b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n1\r\n' * 100
    with pytest.raises(InvalidRequest, match="more than 64 fields"):
        read_form(head, many + b"--b--")


async def test_an_ignored_field_of_a_form_is_none_of_chat(start) -> None:
    async with start(ignore_unknown_options=True) as harness:
        more = {"messages": "x", "max_tokens": "x", "continue_final_message": "x"}
        heard = await harness.http.post(PATH, data=more, files=FILE)
        assert heard.status_code == 200, heard.text
        assert heard.json()["text"] == "Hello, world!"
        assert "Transcribe the speech" in harness.prompt


def test_headers_of_a_form_are_short() -> None:
    """Reading thousands of parameters would hold the event loop for seconds."""
    body = b'--b\r\nContent-Disposition: form-data; name="' + b";" * 7000 + b'"\r\n\r\nx\r\n--b--'
    with pytest.raises(InvalidRequest, match="header size exceeded"):
        read_form("multipart/form-data; boundary=b", body)
    content_type = 'multipart/form-data; boundary=b; x="' + ";" * 9000
    with pytest.raises(InvalidRequest, match="Content-Type has too many parameters"):
        read_form(content_type, b"--b--")


DAMAGED = ("*=undefined''b", "*=idna''" + "b" * 64 + ".", "*" + "9" * 4000 + "=b", "*=b\0''b")


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_parameters_are_the_client_s_fault(damage: str) -> None:
    """RFC 7578 forbids encoded parameters in forms: they count as not given."""
    head = '--b\r\nContent-Disposition: form-data; name="file"; filename' + damage + "\r\n\r\n"
    body = head.encode() + b"x\r\n--b--\r\n"
    fields, file = read_form("multipart/form-data; boundary=b", body)
    assert (fields, file.name, file.data) == ({}, "", b"x")
    with pytest.raises(InvalidRequest, match="send multipart/form-data"):
        read_form("multipart/form-data; boundary" + damage, body)


async def test_each_family_is_asked_as_it_was_trained(family) -> None:
    async with family("qwen3_asr") as harness:
        harness.say[0] = "language German<asr_text>Guten Tag"
        heard = await harness.http.post(PATH, data={"prompt": "names"}, files=FILE)
        assert heard.json()["text"] == "Guten Tag"
        assert "names" in harness.prompt
        assert "Transcribe" not in harness.prompt
        told = await harness.http.post(PATH, data={"language": "en"}, files=FILE)
        assert harness.prompt.endswith("language English<asr_text>")
        assert told.json()["text"] == harness.say[0]
        refused = await harness.http.post("/v1/audio/translations", files=FILE)
        assert refused.status_code == 400
        assert "does not translate" in refused.json()["error"]["message"]
    async with family("fun_asr_nano") as harness:
        refused = await harness.http.post(PATH, data={"language": "en"}, files=FILE)
        assert refused.json()["error"]["param"] == "language"
    async with family("audioflamingo3") as harness:
        await harness.http.post(PATH, files=FILE)
        text = harness.prompt
        assert text.index(FAMILIES["audioflamingo3"].text) < text.index(TOKENIZER.decode([AUDIO]))


async def test_a_model_without_audio_says_so(start) -> None:
    async with start() as harness:
        harness.processor.placeholders.pop("audio")
        harness.app.service.template._placeholders.pop("audio")
        answer = await harness.http.post(PATH, files=FILE)
        assert answer.status_code == 400
        assert "takes no audio" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "file"


async def test_errors_name_the_forms_fields(start) -> None:
    """They named messages[0].content[0], which no form has."""
    async with start() as harness:
        form = {"prompt": harness.processor.placeholders["audio"][1]}
        answer = await harness.http.post(PATH, files=FILE, data=form)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "prompt"), error
    assert "messages" not in error["message"]
