"""Shared definitions of the ranks of a tensor-parallel engine: configuration, commands, groups.

Used by `tensor_parallel` (rank 0, inside the engine process) and `rank_worker` (the others). Plans
travel as msgspec bytes in a uint8 tensor; nothing is ever pickled. All ranks are on one machine:
they meet through a file in a private folder and talk over loopback (and NCCL), so no port is open
to anyone else.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from foveal_runtime.engine.types.step import StepPlan, StepResult
from foveal_runtime.model.checkpoint.loader import load_model
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.config import KVDtype
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.media import MMHash

_IDLE = timedelta(days=365)
"""Between two steps any time may pass; a rank that dies is noticed by its closed connection."""

ENVIRONMENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class RankConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every rank needs to become one. Written by rank 0 into the private folder.

    Attributes:
        store: file through which the ranks meet.
        rendezvous_seconds: for all ranks to meet; step_seconds: for one collective of a step.
    """

    model_path: str
    dtype: str
    device: str
    attention: str
    block_size: int
    kv_dtype: KVDtype = "auto"
    max_model_len: int = 0
    num_ranks: int
    store: str
    rendezvous_seconds: float = 120.0
    step_seconds: float = 300.0

    def device_of(self, rank: int) -> str:
        return f"cuda:{rank}" if self.device.startswith("cuda") else self.device


class Allocate(msgspec.Struct, tag="allocate"):
    """Make the KV pool."""

    num_blocks: int
    num_window_blocks: int = 0


class Step(msgspec.Struct, tag="step"):
    """Execute a plan. `previous` is rank 0's checksum of the last result (0 before the first)."""

    plan: StepPlan
    previous: int


class Warm(msgspec.Struct, tag="warm"):
    """Take encoder outputs from a file (`ModelRunner.load_encoder`)."""

    path: str
    device: dict[MMHash, int]
    host: dict[MMHash, int]


class Close(msgspec.Struct, tag="close"):
    """End in peace."""


Command = Allocate | Step | Warm | Close


def checksum(result: StepResult) -> int:
    """Tokens and failures of a step as a number that must be the same on every rank."""
    tokens = [(s.request_id, s.token_id) for s in result.sampled]
    text = tokens, sorted(result.failed), sorted(result.failed_encodes)
    return zlib.crc32(msgspec.msgpack.encode(text))


class Channel:
    """Rank 0's commands to all others, in order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Command)

    def send(self, command: Command) -> None:
        data = bytearray()
        self._encoder.encode_into(command, data)
        dist.broadcast(torch.tensor([len(data)]), 0, group=self._group)
        dist.broadcast(torch.frombuffer(data, dtype=torch.uint8), 0, group=self._group)

    def receive(self) -> Command:
        """Waits for the next command. Raises RuntimeError when rank 0 has gone."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0, group=self._group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self._group)
        command: Command = self._decoder.decode(memoryview(data.numpy()))
        return command


def rank_environment(rank: int, num_ranks: int) -> dict[str, str]:
    """What transformers reads of a rank, and loopback as the only network."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def join(config: RankConfig, rank: int) -> Channel:
    """Meets the other ranks. Raises StartupError when they do not come in time."""
    cuda = config.device.startswith("cuda")
    if cuda:
        torch.cuda.set_device(rank)
    store = dist.FileStore(config.store, config.num_ranks)
    timeout = timedelta(seconds=config.rendezvous_seconds)
    store.set_timeout(timeout)
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=config.num_ranks,
            timeout=timedelta(seconds=config.step_seconds),
            device_id=torch.device(config.device_of(rank)) if cuda else None,
        )
        group = dist.new_group(backend="gloo", timeout=_IDLE)
    except (RuntimeError, ValueError) as error:
        raise StartupError(
            f"tensor parallel: rank {rank} of {config.num_ranks} could not join the others within "
            f"{config.rendezvous_seconds:.0f} s: {error}"
        ) from error
    return Channel(group)


def load_options() -> dict[str, Any]:
    """from_pretrained's keywords for tensor parallelism in the installed transformers."""
    try:
        from transformers.distributed import DistributedConfig
    except ImportError:
        return {"tp_plan": "auto"}
    if "tp_plan" not in {one.name for one in fields(DistributedConfig)}:
        return {"tp_plan": "auto"}
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def load_shard(config: RankConfig, rank: int) -> TorchRunner:
    """This rank's part of the model, in a runner without KV pool. Raises StartupError."""
    device = config.device_of(rank)
    loaded = load_model(
        config.model_path,
        config.dtype,
        device,
        max_model_len=config.max_model_len,
        **load_options(),
    )
    return TorchRunner(
        loaded,
        device=device,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        attention=config.attention,
    )


def read_config(path: Path) -> RankConfig:
    return msgspec.json.decode(path.read_bytes(), type=RankConfig)
