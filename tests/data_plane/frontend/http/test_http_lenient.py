"""What cannot change the answer is not refused: histories of other servers, odd spellings."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

PIXEL = "data:image/png;base64,iVBORw0KGgo="


ANSWERED_ELSEWHERE = {
    "role": "assistant", "content": "yes", "refusal": None, "annotations": [], "audio": None,
    "function_call": None, "tool_calls": [], "id": "msg_1", "status": "completed", "parsed": None,
    "reasoning_content": None, "cache_control": {"type": "ephemeral"},
}  # fmt: skip


async def test_history_of_another_server_is_taken(harness: Any) -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c"},
        {"type": "refusal", "refusal": "d"},
        {"type": "image_url", "image_url": PIXEL, "detail": "low", "file_id": None},
        {"type": "input_image", "image_url": {"url": PIXEL, "format": "png"}},
    ]
    messages = [
        {"role": "user", "content": parts},
        ANSWERED_ELSEWHERE,
        harness.body()["messages"][0],
    ]
    response = await harness.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert harness.prompt == (
        "<|user|>abcd<image><image><|end|><|assistant|>yes<|end|><|user|>hi<|end|><|assistant|>"
    )


@pytest.mark.parametrize("more", ["", "x" * 5000, "x" * (1 << 20)])
async def test_a_byte_order_mark_is_passed_over(harness: Any, more: str) -> None:
    """Clients of .NET and PowerShell write one; of each way in which bodies are read."""
    part = {"type": "image_url", "image_url": {"url": PIXEL + more}}
    body = harness.body([part, {"type": "text", "text": "hi"}])
    response = await harness.http.post(
        "/v1/chat/completions",
        content=b"\xef\xbb\xbf" + json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("address", [None, {}, "", {"url": ""}])
async def test_empty_address_beside_a_uuid(harness: Any, address: Any) -> None:
    harness.processor.known_uuids.add("u")
    part = {"type": "image_url", "image_url": address, "uuid": "u"}
    assert (await harness.chat([part])).status_code == 200


async def test_calls_of_a_history_reach_a_template_without_tools_as_text(harness: Any) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    response = await harness.http.post("/v1/chat/completions", json={"messages": messages})
    assert response.status_code == 200, response.text
    assert '<|assistant|>{"name": "f", "arguments": {"a": 1}}<|end|><|user|>r' in harness.prompt


@pytest.mark.parametrize("arguments", [{"arguments": None}, {"arguments": ""}, {}])
async def test_calls_without_arguments_are_taken(harness: Any, arguments: dict[str, Any]) -> None:
    """Other servers write null for a function that takes none."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", **arguments}}
    body = harness.body()
    body["messages"].append({"role": "assistant", "content": None, "tool_calls": [call]})
    response = await harness.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert '<|assistant|>{"name": "f", "arguments": {}}' in harness.prompt


async def test_a_role_of_the_template_is_taken_and_another_is_named(harness: Any) -> None:
    message = {"role": "narrator", "content": "x"}
    response = await harness.http.post("/v1/chat/completions", json={"messages": [message]})
    assert response.status_code == 200
    assert harness.prompt.startswith("<|narrator|>x")


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": "0.5", "max_tokens": "8", "seed": "7", "top_p": "1"},
        {"max_tokens": 8.0, "n": 1.0},
        {"verbosity": "low", "stream_interval": 1, "parallel_tool_calls": True},
        {"tools": [], "tool_choice": "none"},
        {"spaces_between_special_tokens": False, "return_token_offsets": False},
        {"vllm_xargs": {}, "kv_transfer_params": {}, "ec_transfer_params": {}},
        {"watermarking": False, "mm_payload": "none"},
        {"return_prompt_text": False, "early_stopping": False, "routed_experts_prompt_start": 0},
        {"thinking_token_budget": -1, "model": ""},
    ],
)
async def test_spellings_of_clients(harness: Any, options: dict[str, Any]) -> None:
    response = await harness.chat(**options)
    assert response.status_code == 200, response.text
    if "max_tokens" in options:
        assert harness.generator.requests[-1].sampling.max_tokens == 8
    if "seed" in options:
        assert harness.generator.requests[-1].sampling.seed == 7


async def test_stream_options_may_have_more_keys(harness: Any) -> None:
    options = {"include_usage": True, "include_obfuscation": False, "continuous_usage_stats": True}
    events = await harness.stream(**harness.body(stream_options=options))
    assert events[0]["usage"]["completion_tokens"] == 0
    assert events[0]["usage"]["prompt_tokens"] > 0
    assert events[-1]["usage"]["completion_tokens"] == len("Hello, world!") + 1


async def test_max_tokens_is_cut_to_what_fits(harness: Any) -> None:
    harness.generator.context_tokens = 100
    response = await harness.chat("x" * 50, max_tokens=90, min_tokens=80)
    assert response.status_code == 200, response.text
    sampling = harness.generator.requests[-1].sampling
    prompt = len(harness.generator.requests[-1].token_ids)
    assert sampling.max_tokens == 100 - prompt
    assert sampling.min_tokens == sampling.max_tokens
    response = await harness.http.post(
        "/v1/completions", json={"prompt": "x" * 50, "max_tokens": 99}
    )
    assert response.status_code == 200
    response = await harness.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 101})
    assert response.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm_xargs", {"a": 1}), ("return_prompt_text", True), ("watermarking", True),
        ("kv_transfer_params", {"do_remote_decode": True}), ("truncation_side", "middle"),
        ("thinking_token_budget", -2),
    ],
)  # fmt: skip
async def test_what_would_change_the_answer_is_named(harness: Any, name: str, value: Any) -> None:
    response = await harness.chat(**{name: value})
    assert (response.status_code, response.json()["error"]["param"]) == (400, name)


async def test_null_fields_that_clients_read(harness: Any) -> None:
    assert (await harness.chat()).json()["prompt_logprobs"] is None
    body = {"prompt": "a", "logprobs": 0, "max_tokens": 2}
    choice = (await harness.http.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["prompt_logprobs"] is None
    assert choice["logprobs"]["top_logprobs"] == [{"H": -0.5}, {"e": -0.5}]


async def test_tokens_named_by_their_ids(harness: Any) -> None:
    response = await harness.chat(logprobs=True, return_tokens_as_token_ids=True, max_tokens=1)
    assert response.json()["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:72"


async def test_masks_of_tokens_reach_the_engine(harness: Any) -> None:
    await harness.chat(allowed_token_ids=[72, 101], bad_words=["He", "x"])
    sampling = harness.generator.requests[-1].sampling
    assert sampling.allowed_token_ids == (72, 101)
    assert sampling.bad_words == ((72, 101), (120,))
    error = (await harness.chat(allowed_token_ids=[10**6])).json()["error"]
    assert error["param"] == "allowed_token_ids"


async def test_prompts_are_truncated_from_either_side(harness: Any) -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2}
    await harness.http.post("/v1/completions", json=body)
    assert harness.prompt == "ef"
    await harness.http.post("/v1/completions", json={**body, "truncation_side": "right"})
    assert harness.prompt == "ab"
    part = {"type": "image_url", "image_url": {"url": PIXEL}}
    error = (await harness.chat([part], truncate_prompt_tokens=2)).json()["error"]
    assert error["param"] == "truncate_prompt_tokens"
    assert (await harness.chat([part], truncate_prompt_tokens=-1)).status_code == 200
    assert harness.prompt == "<|user|><image><|end|><|assistant|>"
    long = [part, {"type": "text", "text": "a" * 5000}]
    error = (await harness.chat(long, truncate_prompt_tokens=-1)).json()["error"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_a_prompt_that_is_cut_to_fit_leaves_room_for_the_answer(
    harness: Any, name: str
) -> None:
    limit = (await harness.http.get("/v1/models")).json()["data"][0]["max_model_len"]
    more = {"truncate_prompt_tokens": -1, name: 10}
    assert (await harness.chat("a" * (limit + 5), **more)).status_code == 200
    request = harness.generator.requests[-1]
    assert (len(request.token_ids), request.sampling.max_tokens) == (limit - 10, 10)


@pytest.mark.parametrize("path", ["/", "/livez", "/health", "/v1/models", "/metrics", "/version"])
async def test_head_is_get_without_a_body(harness: Any, path: str) -> None:
    whole, head = await harness.http.get(path), await harness.http.head(path)
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert (await harness.http.head("/v1/completions")).status_code == 405
    assert "head" not in str((await harness.http.get("/openapi.json")).json()["paths"].values())


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_json_by_another_name_is_told_the_header(harness: Any, kind: str, path: str) -> None:
    body = json.dumps(harness.body())
    headers = {"content-type": kind} if kind else {}
    response = await harness.http.post(path, content=body.encode(), headers=headers)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert f"Content-Type is {kind!r}" in message
    assert "application/json" in message


async def test_a_tool_that_says_nothing(harness: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": None},
    ]
    prompts = []
    for content in (None, ""):
        messages[2]["content"] = content
        response = await harness.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 200, response.text
        prompts.append(harness.prompt)
    assert prompts[0] == prompts[1]


async def test_null_is_as_absent_where_unknown_fields_are_refused(harness: Any) -> None:
    body = {"prompt": "ab", "chat_template": None, "add_special_tokens": None}
    response = await harness.http.post("/tokenize", json=body)
    assert response.json()["tokens"] == [97, 98]
    response = await harness.http.post("/tokenize", json={**body, "chat_template": "x"})
    assert response.json()["error"]["param"] == "chat_template"


async def test_unknown_options_are_refused_unless_told_otherwise(start: Any) -> None:
    async with start(ignore_unknown_options=True) as harness:
        assert (await harness.chat(temprature=0)).status_code == 200
        error = (await harness.chat(use_beam_search=True)).json()["error"]
        assert error["param"] == "use_beam_search", "what is known and not served stays refused"


async def test_load_ping_and_tokenizer(harness: Any) -> None:
    assert (await harness.http.get("/ping")).status_code == 200
    assert (await harness.http.get("/load")).json()["server_load"] == 0
    info = (await harness.http.get("/tokenizer_info")).json()
    assert info["special_tokens"]["eos_token"] == "<|end|>"
    assert info["eos_token"] == "<|end|>"
    assert info["chat_template"]
    for form in ("TEXT", "JSON"):
        response = await harness.http.post(
            "/v1/chat/completions", json=harness.body(),
            headers={"endpoint-load-metrics-format": form},
        )  # fmt: skip
        kind, _, rest = response.headers["endpoint-load-metrics"].partition(" ")
        assert kind == form
        if form == "JSON":
            assert json.loads(rest)["named_metrics"]["kv_cache_usage_perc"] == 0.25
        else:
            assert "named_metrics.kv_cache_usage_perc=0.25" in rest
    assert "endpoint-load-metrics" not in (await harness.chat()).headers


async def test_gauges_of_the_engines_for_endpoint_pickers(harness: Any) -> None:
    """A picker reads them from the frontends' pods, which alone are in its InferencePool."""
    page = (await harness.http.get("/metrics")).text
    families = {f.name: f for f in text_string_to_metric_families(page)}
    for name, value in (("requests_waiting", 0.0), ("kv_cache_usage", 0.25)):
        family = families[f"foveal_engines_{name}"]
        assert family.type == "gauge"
        assert [sample.value for sample in family.samples] == [value]
    assert "vllm:kv_cache_usage_perc" not in families, "sums over all pods would count it twice"


ORIGIN = "https://app.example.org"
PREFLIGHT = {
    "origin": ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_origins_are_off_by_default(harness: Any) -> None:
    response = await harness.http.post(
        "/v1/chat/completions", json=harness.body(), headers={"origin": ORIGIN}
    )
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


async def test_allowed_origins_may_call(start: Any, tmp_path: Any) -> None:
    """A browser's preflight carries no key; a refusal must be readable by the page, too."""
    (tmp_path / "keys").write_text("secret-key-of-a-user\n")
    async with start(allowed_origins=(ORIGIN,), api_key_file=str(tmp_path / "keys")) as harness:
        answer = await harness.http.options("/v1/chat/completions", headers=PREFLIGHT)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        for key, status in (("secret-key-of-a-user", 200), ("wrong", 401)):
            response = await harness.http.post(
                "/v1/chat/completions", json=harness.body(),
                headers={"origin": ORIGIN, "authorization": f"Bearer {key}"},
            )  # fmt: skip
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == ORIGIN
        other = {**PREFLIGHT, "origin": "https://evil.example.org"}
        answer = await harness.http.options("/v1/chat/completions", headers=other)
        assert "access-control-allow-origin" not in answer.headers
        answer = await harness.http.options("/reset_mm_cache", headers=PREFLIGHT)
        assert "access-control-allow-origin" not in answer.headers
