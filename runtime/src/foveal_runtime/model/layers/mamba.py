"""Mamba-2 mixers (Nemotron-H, Granite 4, Falcon-H1, Bamba): with a C kernel between their linear
layers on CPUs, else as transformers computes them, in pieces of bounded memory.

`recurrence` tries whether the kernel (kernels/mamba.h) computes what a module computes; `state`
gives either their sequences' states, and the profiler asks what pieces take. transformers' scan of
a prompt needs much temporary memory for each token, its step of one token some copies of the state:
a few rows at a time bound both, and are faster on CPUs. The scan keeps a token's time step within
the limits of the configuration, the step of one token does not: a token would have other numbers
where a chunk ends before it. Here both keep it there, as transformers' forward over a whole
sequence does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from foveal_runtime.model.cpu.kernels import DONE, MambaJob, RecurrentKernels, RmsNorm
from foveal_runtime.model.cpu.packing import DTYPES
from foveal_runtime.model.layers.delta_rule import Parts
from foveal_runtime.model.layers.layer_parts import Unlike
from foveal_runtime.plan.errors import StartupError

ROWS = 128
"""Tokens of one sequence in one call."""
_CHUNK = 32  # of the scan, which fills the last one up: the result is the same
_STATE_BYTES = 16 << 20  # of sequences that go one token on in one call


class MambaRule:
    """One mixer's forward with the kernel.

    Attributes:
        dtype: of rows and weights.
    """

    NAME = "Mamba-2's recurrence"

    def __init__(self, module: Any, kernels: RecurrentKernels) -> None:
        """Raises Unlike."""
        conv = module.conv1d
        self.dtype = conv.weight.dtype  # linears may be quantised
        if conv.weight.device.type != "cpu":
            raise Unlike("it is on a device")
        if self.dtype not in DTYPES or module.activation not in ("silu", "swish"):
            raise Unlike(f"its convolution is of {self.dtype} with {module.activation}")
        self._module = module
        self._kernels = kernels
        self._decay = -module.A_log.detach().float().exp()
        self._shift, self._skip = (one.detach().float() for one in (module.dt_bias, module.D))
        self._shape = {
            "dtype": DTYPES[self.dtype],
            "num_groups": module.n_groups,
            "num_heads": module.num_heads,
            "head_dim": module.head_dim,
            "state_dim": module.ssm_state_size,
            "taps": module.conv_kernel_size,
            "conv_weight": conv.weight.data_ptr(),
            "conv_bias": 0 if conv.bias is None else conv.bias.data_ptr(),
            "decay": self._decay.data_ptr(),
            "shift": self._shift.data_ptr(),
            "skip": self._skip.data_ptr(),
            **self._norm(module.norm),
        }

    def _norm(self, norm: Any) -> dict[str, Any]:
        """The gate and norm of the kernel's job."""
        if isinstance(norm, nn.Identity):  # some of Falcon-H1's
            return {"norm_size": self._module.intermediate_size}
        if norm.weight.dtype != self.dtype:
            raise Unlike(f"its norm is of {norm.weight.dtype}")
        weight, eps = norm.weight.data_ptr(), norm.variance_epsilon
        if hasattr(norm, "norm_before_gate"):  # Falcon-H1's others
            return {
                "norm": RmsNorm(weight=weight, eps=eps),
                "norm_size": self._module.intermediate_size // norm.n_groups,
                "gates_last": norm.norm_before_gate,
            }
        rounding = RmsNorm(weight=weight, eps=eps, rounds_first=True)
        return {"norm": rounding, "norm_size": norm.group_size}

    def __call__(self, rows: torch.Tensor, parts: Parts, segments: torch.Tensor) -> torch.Tensor:
        """rows (1, T, E), all of them some segment's; segments (n, 3) of int64: first row, number
        of rows, and slot in `parts`, whose states go on. Raises Unlike."""
        out: torch.Tensor = self._module.out_proj(
            self.mix(*project(self._module, rows), parts, segments)
        )
        return out

    def mix(
        self,
        gate: torch.Tensor,
        mixed: torch.Tensor,
        step: torch.Tensor,
        parts: Parts,
        segments: torch.Tensor,
    ) -> torch.Tensor:
        """What `project` gave, to (1, T, heads times dimension). A row's result is the same bits
        whatever else is in the batch, and wherever segments were cut."""
        past, state = parts["conv"], parts["recurrent"]
        dtypes = (mixed.dtype, past.dtype, state.dtype)
        if dtypes != (self.dtype, self.dtype, torch.float32):
            raise Unlike(f"its rows and states are of {dtypes}")
        assert all(one.is_contiguous() for one in (segments, past, state))
        mixed = mixed.clone(memory_format=torch.contiguous_format)  # the kernel convolves in place
        gate, step = gate.contiguous(), step.contiguous()
        out = torch.empty_like(gate)
        job = MambaJob(**self._shape, num_threads=torch.get_num_threads())
        job.num_segments, job.num_rows = len(segments), mixed.shape[1]
        for name, one in (
            ("segments", segments), ("mixed", mixed), ("gate", gate), ("step", step),
            ("out", out), ("past", past), ("state", state),
        ):  # fmt: skip
            setattr(job, name, one.data_ptr())
        if self._kernels.mamba(job) != DONE:
            raise Unlike("its heads have no kernel")
        return out


def project(module: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows (1, T, E) to gates (1, T, heads times dimension), what is convolved (1, T, C), and what
    the time steps are made of (1, T, heads)."""
    if hasattr(module, "mup_vector"):  # Falcon-H1
        projected = module.in_proj(rows * module.ssm_in_multiplier) * module.mup_vector
    else:
        projected = module.in_proj(rows)
    inner = module.intermediate_size
    gate, mixed, step = projected.split((inner, module.conv_dim, module.num_heads), dim=-1)
    return gate, mixed, step


def mixers_of(decoder: nn.Module) -> Iterator[Any]:
    """The decoder's Mamba-2 modules."""
    yield from filter(is_mixer, decoder.modules())


def is_mixer(module: nn.Module) -> bool:
    return hasattr(module, "time_step_limit") and hasattr(module, "chunk_size")


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
