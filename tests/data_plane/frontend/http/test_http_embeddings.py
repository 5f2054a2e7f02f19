"""POST /v1/embeddings over HTTP, in front of a generator that pools token ids."""

from __future__ import annotations

import array
import asyncio
import base64
import json

import numpy as np
import pytest

from foveal_runtime.frontend.engines.sequence import merge
from foveal_runtime.frontend.protocol.requests import MAX_INPUTS
from foveal_runtime.frontend.testing.fake import fake_embedding
from foveal_runtime.frontend.testing.fake_tokenizer import IMAGE, byte_tokenizer
from foveal_runtime.main import frontend
from foveal_runtime.plan.config import Admission, ModelConfig
from foveal_runtime.plan.embedder import Embedder, check_task, read_embedder
from foveal_runtime.plan.errors import StartupError

PATH = "/v1/embeddings"
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TOKENIZER = byte_tokenizer()


def unit(token_ids: list[int], pooling: str = "last", size: int = 4) -> np.ndarray:
    values = np.frombuffer(fake_embedding(token_ids, pooling), "<f4")[:size].astype(np.float64)
    return values / np.linalg.norm(values)


@pytest.fixture
async def embedder(start):
    async with start(task="embed") as harness:
        yield harness


async def post(harness, **body):
    return await harness.http.post(PATH, json={"model": "tiny", **body})


async def vectors(harness, **body) -> list[np.ndarray]:
    answer = await post(harness, **body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return [np.array(one["embedding"]) for one in data]


async def test_text_tokens_and_lists_of_either(embedder) -> None:
    ids = TOKENIZER.encode("hello", add_special_tokens=True)
    for given in ("hello", ids, ["hello"], [ids]):
        found = await vectors(embedder, input=given)
        assert len(found) == 1
        assert np.allclose(found[0], unit(ids), atol=1e-7)
    found = await vectors(embedder, input=["a", "bc", "a"])
    assert np.array_equal(found[0], found[2])
    assert not np.allclose(found[0], found[1])
    assert all(request.sampling.pooling == "last" for request in embedder.generator.requests)


async def test_many_inputs_keep_their_order(embedder) -> None:
    """More than are on their way at a time."""
    texts = [chr(97 + n % 26) * (1 + n % 7) for n in range(300)]
    found = await vectors(embedder, input=texts)
    for text, one in zip(texts, found, strict=True):
        assert np.allclose(one, unit(TOKENIZER.encode(text, add_special_tokens=True)), atol=1e-7)


async def test_many_inputs_are_one_request_in_the_metrics(embedder) -> None:
    """However many go to the engines at a time."""
    assert len(await vectors(embedder, input=["a"] * 257)) == 257
    text = (await embedder.http.get("/metrics")).text

    def total(name: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(name + "{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    assert total("gen_ai_server_request_duration_seconds_count") == 1
    assert total("foveal_request_media_seconds_count") == 1
    assert total("vllm:request_success_total") == 257
    num_tokens = sum(len(request.token_ids) for request in embedder.generator.requests)
    assert total("gen_ai_client_token_usage_sum") == num_tokens


async def test_streams_begin_where_others_end() -> None:
    num_open, seen = 0, []

    async def stream(number: int):
        nonlocal num_open
        num_open += 1
        seen.append(num_open)
        for _ in range(number % 3 + 1):
            await asyncio.sleep(0)
            yield number
        num_open -= 1

    got = [(i, delta) async for i, delta in merge([stream(n) for n in range(20)], most=4)]
    assert sorted(got) == [(n, n) for n in range(20) for _ in range(n % 3 + 1)]
    assert max(seen) == 4


async def test_usage_counts_the_prompts(embedder) -> None:
    answer = (await post(embedder, input=["abc", "de"])).json()
    num = sum(len(request.token_ids) for request in embedder.generator.requests)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["total_tokens"], usage["completion_tokens"]) == (
        num,
        num,
        0,
    )
    assert answer["object"] == "list"
    assert answer["model"] == "tiny"


async def test_base64_is_the_same_numbers(embedder) -> None:
    [plain] = await vectors(embedder, input="hello")
    text = (await post(embedder, input="hello", encoding_format="base64")).json()
    packed = array.array("f", base64.b64decode(text["data"][0]["embedding"]))
    assert np.array_equal(np.array(packed, np.float32), plain.astype(np.float32))


async def test_dimensions_cut_and_normalise_again(embedder) -> None:
    ids = TOKENIZER.encode("hello", add_special_tokens=True)
    [two] = await vectors(embedder, input="hello", dimensions=2)
    assert np.allclose(two, unit(ids, size=2), atol=1e-7)
    refused = await post(embedder, input="hello", dimensions=5)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "dimensions"
    assert "have 4" in refused.json()["error"]["message"]


async def test_not_normalised_when_asked(embedder) -> None:
    ids = TOKENIZER.encode("hello", add_special_tokens=True)
    [raw] = await vectors(embedder, input="hello", normalize=False)
    same = {"use_activation": False, "truncation_side": "right", "embed_dtype": "float32"}
    [again] = await vectors(embedder, input="hello", **same)
    assert (again == raw).all()
    assert np.array_equal(raw, np.frombuffer(fake_embedding(ids, "last"), "<f4").astype(float))


async def test_messages_bring_images(embedder) -> None:
    parts = [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "what"}]
    messages = [{"role": "user", "content": parts}]
    found = await vectors(embedder, messages=messages)
    [request] = embedder.generator.requests
    assert len(found) == 1
    assert request.token_ids.count(IMAGE) == 1
    assert len(request.items) == 1
    assert not embedder.prompt.rstrip().endswith("assistant:")
    [whole] = await vectors(embedder, messages=messages, truncate_prompt_tokens=-1)
    assert (whole == found[0]).all()
    cut = await post(embedder, messages=messages, truncate_prompt_tokens=3)
    assert cut.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input[1]"),
        ({"input": [10**9]}, "input"),
        ({"input": [[1], [10**9]]}, "input[1]"),
        ({"input": [IMAGE]}, "input"),
        ({"input": ["x"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "embed_dtype": "float16"}, "embed_dtype"),
        ({"input": "x", "truncation_side": "left"}, "truncation_side"),
        ({"input": "x", "temperature": 1}, "temperature"),
        ({"input": "x", "cache_salt": "a@b"}, "cache_salt"),
        ({"input": "x" * 5000}, "input"),
    ],
)
async def test_what_is_wrong_is_named(embedder, body, param) -> None:
    answer = await post(embedder, **body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert not embedder.generator.requests


async def test_long_inputs_are_cut_when_asked(embedder) -> None:
    """An embedding needs no room for an output: the whole context is prompt."""
    ids = [65 + n % 26 for n in range(5000)]
    for size, kept in ((-1, 4096), (10, 10)):
        [one] = await vectors(embedder, input=ids, truncate_prompt_tokens=size)
        assert np.allclose(one, unit(ids[:kept]), atol=1e-7)


async def test_each_task_refuses_the_other(start) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    others = {
        "/v1/chat/completions": body,
        "/v1/completions": {"prompt": "x"},
        "/v1/messages": body,
        "/v1/responses": {"input": "x"},
    }
    async with start(task="embed") as harness:
        for path, wrong in others.items():
            answer = await harness.http.post(path, json=wrong)
            assert answer.status_code == 400, path
            assert "--task generate" in answer.json()["error"]["message"]
        assert (await harness.http.get("/")).status_code == 404
    async with start() as harness:
        answer = await post(harness, input="x")
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "unsupported_feature"
        assert "--task embed" in answer.json()["error"]["message"]
    async with start(task="both", pooling="mean") as harness:
        assert (await post(harness, input="x")).status_code == 200
        assert harness.generator.requests[0].sampling.pooling == "mean"
        assert (await harness.chat()).status_code == 200
        assert harness.generator.requests[1].sampling.pooling == ""


async def test_metrics_count_prompts_and_no_output(embedder) -> None:
    await vectors(embedder, input=["a", "b"])
    text = (await embedder.http.get("/metrics")).text

    def count(name: str, label: str = "") -> float:
        lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
        return sum(float(line.split()[-1]) for line in lines)

    assert count("vllm:request_success_total", 'finished_reason="stop"') == 2
    assert count("vllm:e2e_request_latency_seconds_count") == 2
    assert count("vllm:request_prompt_tokens_count") == 2
    assert count("vllm:request_generation_tokens_count") == 0
    assert count("vllm:request_decode_time_seconds_count") == 0


def test_the_checkpoint_says_how(tmp_path) -> None:
    pooling = tmp_path / "1_Pooling"
    pooling.mkdir()
    assert read_embedder(tmp_path) == Embedder("last", normalizes=True)
    modules = [
        {"path": folder, "type": f"sentence_transformers.models.{kind}"}
        for folder, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_N", "Normalize"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    said = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls",
            "pooling_mode_lasttoken": "last"}  # fmt: skip
    for name, found in said.items():
        document = dict.fromkeys(said, False) | {name: True, "word_embedding_dimension": 8}
        (pooling / "config.json").write_text(json.dumps(document))
        assert read_embedder(tmp_path) == Embedder(found, normalizes=True)
        assert read_embedder(tmp_path, "last") == Embedder("last", normalizes=True)
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]))
    assert read_embedder(tmp_path) == Embedder("last", normalizes=False)
    (pooling / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(StartupError, match="max_tokens is not served; --pooling"):
        read_embedder(tmp_path)
    modules.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (pooling / "config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    for pooling in ("", "mean"):
        with pytest.raises(StartupError, match="a layer Dense behind the model"):
            read_embedder(tmp_path, pooling)


def test_an_encoder_embeds_alone(tmp_path) -> None:
    config = tmp_path / "config.json"
    for kind, default in (("bert", "mean"), ("xlm-roberta", "mean"), ("qwen3", "last")):
        config.write_text(json.dumps({"model_type": kind}))
        check_task(tmp_path, "embed")
        assert read_embedder(tmp_path) == Embedder(default, normalizes=True)
        for asked in ("mean", "last", "cls"):
            assert read_embedder(tmp_path, asked) == Embedder(asked, normalizes=True)
        for task in ("generate", "both"):
            if kind == "qwen3":
                check_task(tmp_path, task)
            else:
                with pytest.raises(StartupError, match=f"{kind} is an encoder.*--task embed"):
                    check_task(tmp_path, task)


def test_a_frontend_refuses_to_generate_with_one(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    document = tmp_path / "frontend.json"
    document.write_text(json.dumps({"model": {"path": str(tmp_path)}}))
    with pytest.raises(StartupError, match=r"serve it with --task embed"):
        frontend.run(str(document))


async def test_a_server_of_such_a_checkpoint_pools_so(start, tmp_path) -> None:
    pooling = tmp_path / "1_Pooling"
    pooling.mkdir()
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "modules.json").write_text('[{"path": "1_Pooling", "type": "x.Pooling"}]')
    (pooling / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    for task, given, found in (("embed", "", "mean"), ("embed", "cls", "cls")):
        async with start(
            task=task, pooling=given, model=ModelConfig(path=str(tmp_path), name="tiny")
        ) as harness:
            [plain] = await vectors(harness, input="x")
            [short] = await vectors(harness, input="x", normalize=True)
            [request, _] = harness.generator.requests
            assert request.sampling.pooling == found
            # There is no layer that brings vectors to unit length.
            raw = np.frombuffer(fake_embedding(request.token_ids, found), "<f4")
            assert np.array_equal(plain, raw.astype(float))
            assert np.allclose(short, unit(request.token_ids, found), atol=1e-7)


async def test_more_embeddings_than_fit_name_the_input(start) -> None:
    """`param` was logprobs, which nobody had asked for."""
    async with start(task="embed", admission=Admission(max_answer_scores=1)) as harness:
        answer = await post(harness, input=["a"] * 50)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == "input"
        assert "50 embeddings of" in error["message"]
        assert "the 8 values that this server holds" in error["message"]
        assert (await post(harness, input="a")).status_code == 200
