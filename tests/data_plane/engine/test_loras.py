"""LoRA adapters in an engine behind the protocol: orders, reports, and what keys depend on."""

import weakref

import msgspec
import pytest

from foveal_runtime.engine.events.log import BlockStored, EventLog
from foveal_runtime.engine.events.vllm import VllmBlockStored, VllmEventLog
from foveal_runtime.mirror.messages import Down
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.lora import LoraRef, LoraSource, check_lora_names, lora_sources
from foveal_runtime.plan.sampling import SamplingParams
from foveal_runtime.wire import codec
from foveal_runtime.wire.messages import RequestBody
from tests.support.engine_core_rig import A, Engine

PROMPT = [1, 2, A, 3, 4, 5, 6]


class Rig:
    """An engine, a frontend, and every report of adapters that it was sent."""

    def __init__(self, **options):
        self.engine = Engine(**options)
        self.reports = []
        take = self.engine._take_down

        def note(fid, message):
            if isinstance(message, Down) and message.outputs is not None:
                load = codec.decode_outputs(message.outputs).load
                if load is not None and load.loras is not None:
                    self.reports.append(load.loras)
            take(fid, message)

        self.engine._take_down = note
        self.frontend = self.engine.connect()

    def order(self, action, number, name, path=""):
        self.engine.up(self.frontend, self.frontend.sender.control(action, number, (name, path)))
        self.engine.run()
        return self.reports[-1]

    def ask(self, name, lora=None):
        """Tokens, and how many of the prompt were cached."""
        ids = [9 if part is A else part for part in PROMPT]
        body = RequestBody(
            token_ids=codec.pack_tokens(ids, wide=False)[0], wide=False, placements=((2, 0),),
            sampling=SamplingParams(max_tokens=4, ignore_eos=True), lora=lora,
        )  # fmt: skip
        self.engine.up(self.frontend, self.frontend.request((name, 0), PROMPT, body=body))
        self.engine.run()
        first = self.frontend.first.get((name, 0))
        return self.frontend.tokens[name, 0], None if first is None else first.num_cached_tokens


def test_an_adapter_is_part_of_the_keys_and_its_image_is_shared():
    rig = Rig()
    rig.order("load_lora", 1, "red", "/red")
    red, blue = rig.order("load_lora", 2, "blue", "/blue").refs
    base, none = rig.ask("base")
    assert none == 0
    tokens, cached = rig.ask("red", red)
    assert cached == 0, "what the model itself computed is another thing"
    assert tokens != base
    assert rig.ask("blue", blue)[1] == 0
    assert rig.ask("again", red) == (tokens, 8)
    assert rig.ask("base2") == (base, 8)
    assert rig.engine.runner.num_encoded == 1, "the image is encoded once for all of them"
    rig.engine.assert_clean()


def test_the_content_counts_not_the_name():
    rig = Rig()
    [old] = rig.order("load_lora", 1, "red", "/red").refs
    tokens, _ = rig.ask("a", old)
    assert rig.order("unload_lora", 2, "red").refs == ()
    [new] = rig.order("load_lora", 3, "red", "/other").refs
    assert new.digest != old.digest
    other, cached = rig.ask("b", new)
    assert cached == 0
    assert other != tokens
    rig.ask("c", old)
    assert rig.frontend.errors["c", 0] == ("not_found", "the LoRA adapter 'red' was unloaded")


def test_a_request_holds_its_adapter_from_its_arrival_to_its_end(monkeypatch):
    rig = Rig()
    [red] = rig.order("load_lora", 1, "red", "/red").refs

    class Held:
        pass

    alive = weakref.WeakSet()
    monkeypatch.setattr(rig.engine.runner.loras, "hold", lambda ref: _kept(alive, Held()))
    seen = []
    execute = rig.engine.runner.execute

    def watched(plan):
        if plan.scheduled:
            seen.append(len(alive))
        return execute(plan)

    monkeypatch.setattr(rig.engine.runner, "execute", watched)
    rig.ask("a", red)
    assert seen
    assert set(seen) == {1}
    rig.engine.run()
    assert not alive


def _kept(alive, one):
    alive.add(one)
    return one


def test_orders_are_answered_by_their_numbers():
    rig = Rig()
    report = rig.order("load_lora", 7, "red", "/red")
    assert report.outcomes == ((7, ""),)
    report = rig.order("load_lora", 8, "blue", "bad")
    assert report.outcomes[-1] == (8, "LoRA adapter 'blue': it is bad")
    report = rig.order("load_lora", 11, "blue", "broken")
    assert report.outcomes[-1][1].endswith("MemoryError, see the engine's log")
    report = rig.order("unload_lora", 9, "green")
    assert report.outcomes[-1][1].endswith("no adapter of this name is loaded")
    report = rig.order("load_lora", 10, " fake", "/x")
    assert "a name has 1 to 256 printable characters" in report.outcomes[-1][1]
    for number in range(40):
        report = rig.order("unload_lora", 100 + number, "green")
    assert len(report.outcomes) == 16


def test_reports_come_with_changes_and_with_sessions():
    rig = Rig()
    rig.order("load_lora", 1, "red", "/red")
    known = len(rig.reports)
    rig.ask("a")
    assert len(rig.reports) == known, "nothing changed"
    late = rig.engine.connect("f2")
    rig.engine.run()
    assert [ref.name for ref in rig.reports[-1].refs] == ["red"]
    info = codec.decode_info(rig.engine.core.receiver.info)
    assert [ref.name for ref in info.loras] == ["red"]
    assert late.sender.is_up


def test_events_name_the_adapter():
    batches = []
    rig = Rig(events=EventLog("e0", batches.append))
    [red] = rig.order("load_lora", 1, "red", "/red").refs
    rig.ask("base")
    rig.ask("red", red)
    stored = [e for batch in batches for e in batch.events if isinstance(e, BlockStored)]
    assert {event.lora for event in stored} == {None, ("red", red.digest)}
    roots = {e.parent for e in stored} - {e.block_hash for e in stored}
    assert len(roots) == 2


def test_events_in_vllms_schema_name_the_adapter():
    batches = []
    rig = Rig(events=VllmEventLog("e0", batches.append))
    [red] = rig.order("load_lora", 1, "red", "/red").refs
    rig.ask("red", red)
    [stored] = [e for b in batches for e in b.events if isinstance(e, VllmBlockStored)][:1]
    assert stored.lora_name == "red"
    assert stored.extra_keys[0][-1] == red.digest.hex()


def test_an_older_frontend_asks_without_an_adapter():
    body = msgspec.msgpack.encode([b"\1\0", False, [], msgspec.msgpack.decode(
        msgspec.msgpack.encode(SamplingParams(max_tokens=1))
    )])  # fmt: skip
    assert codec.decode_body(msgspec.Raw(body), 0).lora is None


@pytest.mark.parametrize("name", ["", " red", "a\nb", "x" * 257, "served"])
def test_names_that_no_request_could_give(name: str):
    with pytest.raises(StartupError, match="LoRA adapter"):
        check_lora_names([name], "served")


def test_flags_name_adapters(tmp_path):
    assert lora_sources([f"red={tmp_path}"]) == (LoraSource("red", str(tmp_path)),)
    for text in ("red", "red="):
        with pytest.raises(StartupError, match="write NAME=DIRECTORY"):
            lora_sources([text])
    with pytest.raises(StartupError, match="twice"):
        check_lora_names(["red", "red"], "served")
    assert LoraRef("a", b"1") == LoraRef("a", b"1")
