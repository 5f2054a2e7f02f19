"""LoRA adapters over HTTP: named as the model, listed, loaded with the admin key."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foveal_runtime.frontend.engines.loras import order_lora, serves, why_none
from foveal_runtime.frontend.engines.routing import affinity_keys
from foveal_runtime.plan.errors import InvalidRequest, NoEngine
from foveal_runtime.plan.lora import NOT_LOADED, LoraRef
from foveal_runtime.wire.messages import EngineInfo, LoraReport
from tests.support.scripted_engines import collect, expected, make_request, running, until

RED = LoraRef("red", b"r" * 16)
BLUE = LoraRef("blue", b"b" * 16)


class Admin:
    """A CacheAdmin that notes orders."""

    def __init__(self) -> None:
        self.orders: list[tuple[str, str, str]] = []

    async def order_lora(self, action: str, name: str, path: str) -> int:
        self.orders.append((action, name, path))
        if path == "bad":
            raise InvalidRequest(f"LoRA adapter {name!r}: it is bad")
        return 3


async def test_requests_name_the_adapter_as_model(harness: Any) -> None:
    harness.generator.adapters = {"red": RED}
    answer = await harness.chat("hi", model="red")
    assert answer.json()["model"] == "red"
    assert harness.generator.requests[-1].lora == RED
    completion = await harness.http.post("/v1/completions", json={"model": "red", "prompt": "hi"})
    assert completion.json()["model"] == "red"
    assert harness.generator.requests[-1].lora == RED
    message = {"model": "red", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    answered = await harness.http.post("/v1/messages", json=message)
    assert answered.json()["model"] == "red"
    assert harness.generator.requests[-1].lora == RED
    await harness.chat("hi")
    assert harness.generator.requests[-1].lora is None
    refused = await harness.chat("hi", model="green")
    assert refused.status_code == 404
    assert "this server has 'tiny', 'red'" in refused.json()["error"]["message"]


async def test_models_list_adapters(harness: Any) -> None:
    harness.generator.adapters = {"red": RED, "blue": BLUE}
    listed = (await harness.http.get("/v1/models")).json()
    cards = listed["data"]
    assert (listed["first_id"], listed["last_id"]) == ("tiny", "red")
    assert [(card["id"], card["parent"]) for card in cards] == [
        ("tiny", None), ("blue", "tiny"), ("red", "tiny"),
    ]  # fmt: skip
    assert (await harness.http.get("/v1/models/red")).json()["root"] == "tiny"
    assert (await harness.http.get("/v1/models/green")).status_code == 404


async def test_adapters_are_loaded_with_the_admin_key(start: Any, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("user")
    (tmp_path / "admin").write_text("root")
    admin = Admin()
    files = {f"{name}_key_file": str(tmp_path / name) for name in ("api", "admin")}
    async with start(admin=admin, **files) as harness:

        async def post(path: str, key: str = "root", **body: str) -> Any:
            headers = {"authorization": f"Bearer {key}"}
            return await harness.http.post(path, json=body, headers=headers)

        load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
        for path in (load, unload):
            refused = await post(path, "user", lora_name="red", lora_path="/red")
            assert refused.status_code == 401
        assert not admin.orders
        done = await post(load, lora_name="red", lora_path="/red")
        assert done.json() == {"lora_name": "red", "num_engines": 3}
        assert (await post(unload, lora_name="red")).status_code == 200
        bad = await post(load, lora_name="red", lora_path="bad")
        assert bad.status_code == 400
        assert bad.json()["error"]["message"] == "LoRA adapter 'red': it is bad"
        assert (await post(load, lora_name="red")).status_code == 400
        taken = await post(load, lora_name="tiny", lora_path="/red")
        assert taken.status_code == 400
        assert "the served model has this name already" in taken.json()["error"]["message"]
        assert admin.orders[:2] == [("load_lora", "red", "/red"), ("unload_lora", "red", "")]


async def test_without_an_engine_nobody_says_that_a_model_does_not_exist(harness: Any) -> None:
    harness.generator.num_engines = 0
    refused = await harness.chat("hi", model="red")
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "no_engine"


async def test_adapters_are_known_while_engines_restart() -> None:
    async with running(1, wait_seconds=0.1) as (scripted, client):
        [link] = client.links()
        link.loras = LoraReport((RED,))
        await scripted.engines[link.endpoint].stop()
        await until(lambda: not client.num_ready_engines())
        assert client.loras() == {"red": RED}
        request = make_request("r", 1)
        request.lora = RED
        with pytest.raises(NoEngine, match="no engine was ready"):
            await collect(client, request)


class Link:
    """An engine that answers orders at once; `outcome` None: one of an older version."""

    is_ready = True

    def __init__(self, name: str, outcome: str | None) -> None:
        self.endpoint = self.name = name
        self.outcome = outcome
        known = None if outcome is None else ()
        self.info = EngineInfo(name, "tiny", "", 9, 8, loras=known)
        self.loras = LoraReport(())
        self.sender = SimpleNamespace(is_up=True)

    def control(self, action: str, value: int, lora: tuple[str, ...]) -> bool:
        assert self.outcome is not None, "it would never answer"
        self.loras = LoraReport((), ((value, self.outcome),))
        return True


ABSENT = f"LoRA adapter 'red': {NOT_LOADED}"


@pytest.mark.parametrize(
    ("action", "outcomes", "wanted"),
    [
        ("load_lora", ["", ""], 2),
        ("load_lora", ["", "bad"], "bad (1 of 2 engines did it)"),
        ("load_lora", ["", None], "engines of an older version serve no adapters (1 of 2"),
        ("unload_lora", ["", ABSENT, None], 1),
        ("unload_lora", [ABSENT, ABSENT], ABSENT),
        ("unload_lora", ["", "bad"], "bad (1 of 2 engines did it)"),
    ],
)
async def test_orders_count_engines(
    action: str, outcomes: list[str | None], wanted: int | str
) -> None:
    links: Any = [Link(f"e{number}", outcome) for number, outcome in enumerate(outcomes)]
    if isinstance(wanted, int):
        assert await order_lora(links, action, ("red", "/red")) == wanted
        return
    with pytest.raises(InvalidRequest, match=re.escape(wanted)):
        await order_lora(links, action, ("red", "/red"))


def test_routing_knows_prompts_by_adapter_and_items_by_content() -> None:
    tokens, items = list(range(300)), [b"i" * 32]
    base, red, blue = (affinity_keys(tokens, items, b"", lora) for lora in (b"", b"r", b"b"))
    assert base[0] == red[0] == blue[0], "an image's home is the same for all adapters"
    assert not {*base[1:]} & {*red[1:]}
    assert not {*red[1:]} & {*blue[1:]}


async def test_requests_go_where_their_adapter_is() -> None:
    async with running(3, wait_seconds=0.1) as (scripted, client):
        links = {link.endpoint: link for link in client.links()}
        holder = sorted(links)[1]
        links[holder].loras = LoraReport((RED,))
        assert client.loras() == {"red": RED}
        for number in range(4):
            request = make_request(f"r{number}", 1)
            request.lora = RED
            assert await collect(client, request) == expected(request)
        assert scripted.taken() == [holder] * 4
        request = make_request("other", 1)
        request.lora = BLUE
        with pytest.raises(NoEngine, match="that has the LoRA adapter 'blue'"):
            await collect(client, request)
        assert not any(serves(link, request) for link in links.values())
        assert why_none(links.values(), make_request("plain", 1)) == ""
