"""A rank other than 0 of a tensor-parallel engine: obeys the commands of rank 0 until it closes.

Started by `tensor_parallel` as `python -m foveal_runtime.model.parallel.rank_worker CONFIG RANK`,
with a pipe as standard input whose end means that rank 0 is gone. Decides nothing and answers
nothing: collectives inside the model are its only output.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

from foveal_runtime.model.parallel.ranks import (
    Allocate,
    Channel,
    Step,
    Warm,
    checksum,
    join,
    load_shard,
    read_config,
)
from foveal_runtime.model.runner.runner import TorchRunner
from foveal_runtime.plan.errors import StartupError

_log = logging.getLogger(__name__)
READY = b"ready\n"


def main(arguments: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="rank %(message)s", stream=sys.stderr)
    config, rank = read_config(Path(arguments[0])), int(arguments[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _say_ready()
    try:
        channel = join(config, rank)
        runner = load_shard(config, rank)
        return _obey(channel, runner, rank)
    except StartupError as error:
        _log.error("%d: %s", rank, error.message)
        return 2


def _obey(channel: Channel, runner: TorchRunner, rank: int) -> int:
    mine = 0
    while True:
        command = channel.receive()
        if isinstance(command, Step):
            if command.previous != mine:
                _log.error("%d: its tokens of step %d differ from rank 0's; the engine must end",
                           rank, command.plan.step - 1)  # fmt: skip
                return 3
            mine = checksum(runner.execute(command.plan))
        elif isinstance(command, Allocate):
            runner.allocate_kv(command.num_blocks, num_window_blocks=command.num_window_blocks)
        elif isinstance(command, Warm):
            wanted = command.device.keys() | command.host.keys()
            if set(runner.load_encoder(command.path, command.device, command.host)) != wanted:
                _log.error("%d: it read other encoder outputs than rank 0; the engine must end",
                           rank)  # fmt: skip
                return 3
        else:
            runner.close()
            return 0


def _say_ready() -> None:
    """Imports are done. What is printed later must not fill a pipe nobody reads."""
    os.write(1, READY)
    os.dup2(2, 1)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(4)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # threads of a broken process group may wait for a peer that is gone
