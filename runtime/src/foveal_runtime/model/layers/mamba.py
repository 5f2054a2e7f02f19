"""Mamba-2 mixers as transformers computes them, in pieces of bounded memory.

Called by state.py, which gives them their sequences' states, and by the profiler. transformers'
scan of a prompt needs much temporary memory for each token, its step of one token some copies of
the state: a few rows at a time bound both, and are faster on CPUs. The scan keeps a token's time
step within the limits of the configuration, the step of one token does not: a token would have
other numbers where a chunk ends before it. Here both keep it there, as transformers' forward over
a whole sequence does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from foveal_runtime.plan.errors import StartupError

ROWS = 128
"""Tokens of one sequence in one call."""
_CHUNK = 32  # of the scan, which fills the last one up: the result is the same
_STATE_BYTES = 16 << 20  # of sequences that go one token on in one call


def mixers_of(decoder: nn.Module) -> Iterator[Any]:
    """The decoder's Mamba-2 modules."""
    for module in decoder.modules():
        if hasattr(module, "time_step_limit") and hasattr(module, "chunk_size"):
            yield module


def num_sequences(module: Any) -> int:
    """Sequences that go one token on in one call."""
    return max(1, _STATE_BYTES // _state_bytes(module))


def scratch_bytes(module: Any) -> int:
    """Temporary memory of a call, as a bound: for each head, the scan's copies of keys, queries and
    values, weights of pairs of tokens and states of its chunks; or copies of the states."""
    keys, values = module.ssm_state_size, module.head_dim
    of_token = 10 * keys + 9 * values + 9 * _CHUNK + 5 * keys * values // _CHUNK
    scan = ROWS * module.num_heads * of_token * 4
    return int(max(scan, 9 * num_sequences(module) * _state_bytes(module)))


def _state_bytes(module: Any) -> int:
    return int(module.num_heads * module.head_dim * module.ssm_state_size * 4)


def settle(module: Any) -> None:
    """Makes a module ready for pieces, once it is loaded. Raises StartupError."""
    module.chunk_size = min(module.chunk_size, _CHUNK)
    low, high = (_before_softplus(limit) for limit in module.time_step_limit)
    if (low, high) == (-math.inf, math.inf):
        return
    if hasattr(module, "mup_vector"):
        raise StartupError(
            f"time_step_limit {list(module.time_step_limit)} in config.json is not supported "
            "beside multipliers; leave it out"
        )

    def hold(_: Any, __: Any, projected: torch.Tensor) -> torch.Tensor:
        bias = module.dt_bias.float()
        steps = projected[..., -module.num_heads :]
        steps.copy_(steps.float().clamp(low - bias, high - bias))
        return projected

    module.in_proj.register_forward_hook(hold)


def _before_softplus(step: float) -> float:
    if step in (0, math.inf):
        return -math.inf if step == 0 else math.inf
    return step + math.log(-math.expm1(-step))
