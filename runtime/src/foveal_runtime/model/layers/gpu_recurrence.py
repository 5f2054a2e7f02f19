"""One token of each sequence through a layer with a recurrent state, by Triton kernels on GPUs.

Made by `recurrence`, which tries them with the module's own weights; prompts are the modules'.
transformers' operators copy each state several times for a token, in dozens of kernels that the
host starts one by one. These are one or two, know slots from the device's memory alone, and so can
be recorded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from foveal_runtime.model.cpu.packing import DTYPES
from foveal_runtime.model.gpu import recurrent_kernels as kernels
from foveal_runtime.model.gpu.launch import next_power_of_2
from foveal_runtime.model.layers import delta_rule, mamba
from foveal_runtime.model.layers.delta_rule import Parts
from foveal_runtime.model.layers.layer_parts import Unlike

_MOST_STATE = 128 * 256
"""Numbers of a head's state that one program has in its registers."""
_CHANNELS, _WARPS = 128, 4


class _Step:
    """What all have: a short convolution.

    Attributes:
        dtype: of rows and weights.
    """

    def __init__(self, module: Any, conv: nn.Conv1d, activation: str | None) -> None:
        """Raises Unlike."""
        self.dtype = conv.weight.dtype  # linears may be quantised
        if self.dtype not in DTYPES or activation not in ("silu", "swish", None):
            raise Unlike(f"its convolution is of {self.dtype} with {activation}")
        self._module = module
        self._conv = conv
        self._has_silu = activation is not None

    def _convolved(self, mixed: torch.Tensor, past: torch.Tensor, slots: torch.Tensor) -> Any:
        """mixed (n, C) to the same behind its convolution, whose last inputs go on."""
        count, width = mixed.shape
        taps = past.shape[-1]
        if past.dtype != self.dtype or mixed.dtype != self.dtype or mixed.stride(1) != 1:
            raise Unlike(f"its rows and inputs are of {mixed.dtype} and {past.dtype}")
        assert past.is_contiguous()
        out = torch.empty(count, width, dtype=mixed.dtype, device=mixed.device)
        bias = self._conv.bias
        kernels.convolve_kernel[count, -(-width // _CHANNELS)](
            mixed, past, self._conv.weight, self._conv.weight if bias is None else bias, slots,
            out, mixed.stride(0),
            WIDTH=width, TAPS=taps, HAS_BIAS=bias is not None, HAS_SILU=self._has_silu,
            BLOCK=_CHANNELS, num_warps=_WARPS,
        )  # fmt: skip
        return out


def _warps(state: torch.Tensor) -> int:
    """Of a program with a head's state (slots, heads, rows, columns); no number of it may be in two
    threads. Raises Unlike."""
    size = next_power_of_2(state.shape[2]) * next_power_of_2(state.shape[3])
    if not 32 <= size <= _MOST_STATE or state.dtype != torch.float32:
        raise Unlike(f"a head's state of {state.shape[2]} x {state.shape[3]} has no kernel")
    assert state.is_contiguous()
    return min(8, max(1, size // 512))


class ConvStep(_Step):
    """A short convolution between two gates (LFM2, LFM3)."""

    NAME = "the short convolution"

    def __init__(self, module: Any) -> None:
        """Raises Unlike."""
        super().__init__(module, module.conv, None)

    def __call__(self, rows: torch.Tensor, parts: Parts, slots: torch.Tensor) -> torch.Tensor:
        """rows (1, n, E), one of each sequence; slots (n) of int64, on the device, of sequences
        whose states go on, or below 0. Raises Unlike."""
        before, behind, value = self._module.in_proj(rows)[0].chunk(3, dim=-1)
        convolved = self._convolved(before * value, parts["conv"], slots)
        out: torch.Tensor = self._module.out_proj((behind * convolved)[None])
        return out


class _RecurrentStep(_Step):
    """And a recurrence behind it."""

    def __init__(self, module: Any) -> None:
        """Raises Unlike."""
        super().__init__(module, module.conv1d, module.activation)
        self._decay = -module.A_log.detach().float().exp()
        self._shift = module.dt_bias.detach().float()


class DeltaStep(_RecurrentStep):
    """A gated delta net (Qwen3.5, Qwen3-Next)."""

    NAME = delta_rule.DeltaRule.NAME

    def __call__(self, rows: torch.Tensor, parts: Parts, slots: torch.Tensor) -> torch.Tensor:
        """As `ConvStep`."""
        module, state = self._module, parts["recurrent"]
        mixed, gate, rate, step = (one[0].contiguous() for one in delta_rule.project(module, rows))
        mixed = self._convolved(mixed, parts["conv"], slots)
        _, heads, keys, values = state.shape
        out = torch.empty(1, len(slots), heads * values, dtype=self.dtype, device=rows.device)
        kernels.delta_kernel[len(slots), heads](
            mixed, gate, rate, step, self._decay, self._shift, module.norm.weight, slots, state,
            out, 1 / math.sqrt(keys), module.norm.variance_epsilon,
            KEY_HEADS=module.num_k_heads, HEADS=heads, KEYS=keys, VALUES=values,
            KEY_BLOCK=next_power_of_2(keys), VALUE_BLOCK=next_power_of_2(values),
            num_warps=_warps(state),
        )  # fmt: skip
        whole: torch.Tensor = module.out_proj(out)
        return whole


class MambaStep(_RecurrentStep):
    """A Mamba-2 mixer."""

    NAME = mamba.MambaRule.NAME

    def __init__(self, module: Any) -> None:
        """Raises Unlike."""
        super().__init__(module)
        self._skip = module.D.detach().float()

    def __call__(self, rows: torch.Tensor, parts: Parts, slots: torch.Tensor) -> torch.Tensor:
        """As `ConvStep`."""
        module, state = self._module, parts["recurrent"]
        gate, mixed, step = (one[0] for one in mamba.project(module, rows))
        mixed = self._convolved(mixed, parts["conv"], slots)
        _, heads, values, keys = state.shape
        out = torch.empty(len(slots), heads * values, dtype=self.dtype, device=rows.device)
        kernels.mamba_kernel[len(slots), heads](
            mixed, step, self._decay, self._shift, self._skip, slots, state, out, step.stride(0),
            GROUPS=module.n_groups, HEADS=heads, VALUES=values, KEYS=keys,
            VALUE_BLOCK=next_power_of_2(values), KEY_BLOCK=next_power_of_2(keys),
            num_warps=_warps(state),
        )  # fmt: skip
        if isinstance(module.norm, nn.Identity):  # some of Falcon-H1's
            out = out * nn.functional.silu(gate)
        else:
            out = module.norm(out[None], gate[None])[0]
        whole: torch.Tensor = module.out_proj(out[None].to(self.dtype))
        return whole
