"""POST /v1/media/items: own key, own namespace, typed refusals."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.frontend.items.processor_cache import ProcessorCache
from foveal_runtime.frontend.media.protocol import PlaceholderInfo, ProcessorInfo
from foveal_runtime.frontend.testing.fake import NoEngines
from foveal_runtime.plan.config import InjectionConfig
from foveal_runtime.wire.item import pack_item

PATH = "/v1/media/items"


def make_injector(config: InjectionConfig) -> tuple[Injector, ProcessorCache]:
    image = PlaceholderInfo(0, "<i>", 4, 4, "<i>", "offsets")
    cache = ProcessorCache(1 << 20)
    info = ProcessorInfo(b"i" * 16, (image,))
    return Injector(config, info, cache, FrontendStats(), NoEngines()), cache


def payload(name: str = "cat") -> bytes:
    value = pack_item(0, (4, 4), ((0, 2),), {"x": ("float32", np.ones((1, 3), "f4"))})
    return msgspec.msgpack.encode({"items": [{"modality": "image", "name": name, "value": value}]})


def headers(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}", "content-type": "application/msgpack"}


async def test_injection_has_its_own_key_and_stores(start: Any, tmp_path: Path) -> None:
    (tmp_path / "api").write_text("user")
    (tmp_path / "inject").write_text("router")
    config = InjectionConfig(enabled=True, api_key_file=str(tmp_path / "inject"))
    injector, cache = make_injector(config)
    async with start(
        injector=injector, injection=config, api_key_file=str(tmp_path / "api")
    ) as harness:
        refused = await harness.http.post(PATH, content=payload(), headers=headers("user"))
        assert refused.status_code == 401
        assert len(cache) == 0
        answer = await harness.http.post(PATH, content=payload(), headers=headers("router"))
        assert answer.json() == {"stored": 1, "sent": 0}
        assert cache.is_cached(injector.recall("cat", b""))
        bad = await harness.http.post(PATH, content=b"\xc1", headers=headers("router"))
        assert bad.status_code == 400
        assert bad.json()["error"]["code"] == "invalid_request_error"


def _item(**fields: Any) -> bytes:
    return msgspec.json.encode({"items": [{"modality": "image", "name": "cat", **fields}]})


def _deep_value() -> bytes:
    """An item whose header ends in a field too many, nested without end."""
    header = msgspec.msgpack.encode([0, [4], [[0, 1]], [], 0])[:-1] + b"\x91" * 100_000 + b"\x90"
    return b"FMI1" + len(header).to_bytes(4, "little") + header


async def test_what_no_item_can_be_is_the_clients_error(start: Any, tmp_path: Path) -> None:
    """Nesting too deep for the decoder, and numbers of more than 64 bits, were answered with 500;
    each names where it is."""
    (tmp_path / "inject").write_text("router")
    config = InjectionConfig(enabled=True, api_key_file=str(tmp_path / "inject"))
    injector, cache = make_injector(config)
    field = {"x": {"dtype": "float32", "shape": [1], "data": b"1234"}}
    said = []
    async with start(injector=injector, injection=config) as harness:
        for body in (
            _item(value=_deep_value()),
            _item(replacement=[-1], fields=field),
            _item(replacement=[4, 2**32], fields=field),
            _item(replacement=[4], embed_runs=[[2**32, 1]], fields=field),
            _item(replacement=[4], fields=field).replace(b"[4]", b"[%d]" % 2**70),
        ):
            answer = await harness.http.post(
                PATH, content=body, headers={"authorization": "Bearer router"}
            )
            assert answer.status_code == 400, answer.text
            said.append(answer.json()["error"]["message"])
    assert "items[0]: header: maximum recursion" in said[0]
    assert all("$.items[0].replacement[" in one for one in (said[1], said[2], said[4]))
    assert "$.items[0].embed_runs[0][0]" in said[3]
    assert len(cache) == 0


async def test_without_injection_there_is_no_endpoint(start: Any) -> None:
    injector, _ = make_injector(InjectionConfig())
    async with start(injector=injector) as harness:
        answer = await harness.http.post(PATH, content=payload())
        assert answer.status_code == 404


def test_every_key_has_the_length_that_engines_take() -> None:
    """64 characters of pairs with spaces between made a key of 22 bytes: each engine that was sent
    such an item ended the session of the frontend."""
    injector, _ = make_injector(InjectionConfig(enabled=True, trusted=True))
    names = ["ab " * 20 + "abcd", "ab" * 32, "AB" * 32, "zz" * 32, "cat"]
    found = {name: injector.recall(name, b"") for name in names}
    assert {len(key) for key in found.values()} == {32}
    assert [name for name in names if found[name] == b"\xab" * 32] == ["ab" * 32, "AB" * 32]
