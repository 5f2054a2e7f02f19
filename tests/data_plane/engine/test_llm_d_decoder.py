"""Cache events as llm-d's router decodes them: its own files, unmodified, compiled by Go.

`make clients` runs it, where Go is; the files come from Go's module proxy, checked by hash.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foveal_runtime.engine.events.vllm import VllmEventLog
from tests.support.engine_core_rig import A, B, Engine
from tests.support.vllm_event_reader import VllmEventReader

MADE = f"{os.environ.get('FOVEAL_E2E', '/var/tmp/foveal-e2e')}/go/bin"  # by e2e/cluster/build.sh
GO = shutil.which("go", path=os.pathsep.join([os.environ["PATH"], MADE])) or ""
pytestmark = [
    pytest.mark.extended,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not (GO and "FOVEAL_LLM_D" in os.environ),
        reason="llm-d's decoder: `make clients` compiles it, with Go 1.26 or newer",
    ),
]
BLOCK = 4
MODULE = "github.com/llm-d/llm-d-kv-cache"
VERSION, SUM = "v0.8.1", "h1:zYf2c+vtiikGneWSGf2wgaZdzaqhF+EG6FdylfznsLU="
FILES = ("events.go", "engineadapter/vllm_adapter.go", "engineadapter/common.go")
PROGRAM = """
package main

import (
	"encoding/json"
	"io"
	"os"

	"MODULE/pkg/kvevents"
	"MODULE/pkg/kvevents/engineadapter"
)

func main() {
	var payloads [][]byte
	data, err := io.ReadAll(os.Stdin)
	if err == nil {
		err = json.Unmarshal(data, &payloads)
	}
	if err != nil {
		panic(err)
	}
	out := json.NewEncoder(os.Stdout)
	for _, payload := range payloads {
		message := kvevents.RawMessage{Topic: "kv@pod-1@model", Payload: payload}
		pod, model, batch, err := engineadapter.NewVLLMAdapter().ParseMessage(&message)
		if err != nil {
			panic(err)
		}
		for _, event := range batch.Events {
			out.Encode([]any{pod, model, event.Type(), event})
		}
	}
}
""".replace("MODULE", MODULE)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program. Only the decoder's own files: the rest of the package needs all of Kubernetes'
    client."""
    folder: Path = tmp_path_factory.mktemp("llm-d")

    def go(*arguments: str) -> bytes:
        command = [GO, *arguments]
        return subprocess.run(
            command, cwd=folder, check=True, timeout=240, stdout=subprocess.PIPE
        ).stdout

    theirs = json.loads(go("mod", "download", "-json", f"{MODULE}@{VERSION}"))
    assert theirs["Sum"] == SUM
    for name in FILES:
        target = folder / "pkg/kvevents" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(theirs["Dir"], "pkg/kvevents", name), target)
    found = re.search(r"github.com/vmihailenco/msgpack/v5 v\S+", Path(theirs["GoMod"]).read_text())
    assert found
    (folder / "go.mod").write_text(f"module {MODULE}\n\ngo 1.25.0\n\nrequire {found[0]}\n")
    (folder / "main.go").write_text(PROGRAM)
    go("mod", "tidy")
    go("build", "-o", "decoder", ".")
    return folder / "decoder"


def test_every_event_is_decoded_with_its_images(decoder: Path) -> None:
    """Through stores, evictions from a small pool, and the blocks of two images."""
    payloads: list[bytes] = []
    reader = VllmEventReader()

    def publish(batch: Any) -> None:
        payloads.append(msgspec.msgpack.encode(batch))
        reader.read(payloads[-1])

    engine = Engine(events=VllmEventLog("e0", publish), num_blocks=12)
    frontend = engine.connect()
    prompts: list[list[Any]] = [[1, 2, A, 3], [1, 2, B, 3], list(range(24)), [7, 8, A, B, 9]]
    for number, prompt in enumerate(prompts):
        engine.up(frontend, frontend.request((f"r{number}", 0), prompt))
        engine.run()
    done = subprocess.run(
        [decoder], input=msgspec.json.encode(payloads), capture_output=True, check=True, timeout=60
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one[:2] == ["pod-1", "model"] for one in events)
    kinds = [kind for _, _, kind, _ in events]
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(kinds)
    held: dict[int, list[Any] | None] = {}
    for _, _, kind, event in events:
        if kind == "BlockStored":
            held |= dict(zip(event["BlockHashes"], event["ExtraKeys"], strict=True))
            assert len(event["Tokens"]) == BLOCK * len(event["BlockHashes"])
        elif kind == "BlockRemoved":
            for name in event["BlockHashes"]:
                del held[name]
        else:
            held = {}
    assert held.keys() == reader.blocks.keys()
    keys = {key for extra in held.values() for key, _ in extra or ()}
    assert keys <= {A.mm_hash.hex(), B.mm_hash.hex()}
    assert keys, "no image is named"
