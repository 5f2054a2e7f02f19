"""Gated delta nets (Qwen3.5, Qwen3-Next) with a C kernel between their linear layers, on CPUs.

Made by `recurrence` for each layer with such a net. transformers computes the delta rule with
torch's operators in chunks of 64 tokens, for each sequence alone, which takes many times as long as
the layer's linear layers. Here these take all tokens of a step at once, and the kernel
(kernels/delta_rule.h) does the rest, with the states where the pool has them.

That a module has the parts of such a layer is read from it; that they compute what the kernel
computes, `recurrence` tries with the module's own weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foveal_runtime.model.cpu.kernels import DONE, DeltaJob, RecurrentKernels
from foveal_runtime.model.cpu.packing import DTYPES
from foveal_runtime.model.layers.layer_parts import Unlike

Parts = Mapping[str, torch.Tensor]
"""A layer's states: "conv" (slots, C, taps) in the model's dtype, "recurrent" (slots, value heads,
key dimension, value dimension) in float32."""
Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class DeltaRule:
    """One module's forward with the kernel.

    Attributes:
        dtype: of rows and weights.
    """

    NAME = "the gated delta rule"

    def __init__(self, module: Any, kernels: RecurrentKernels) -> None:
        """Raises Unlike."""
        dtype = module.conv1d.weight.dtype  # linears may be quantised
        if module.conv1d.weight.device.type != "cpu":
            raise Unlike("it is on a device")
        dtypes = {one.weight.dtype for one in (module.conv1d, module.norm)}
        if dtype not in DTYPES or dtypes != {dtype}:
            raise Unlike(f"its dtypes are {dtype} and {dtypes}")
        if module.conv1d.bias is not None or module.activation not in ("silu", "swish"):
            raise Unlike("its convolution is another")
        self._module = module
        self._kernels = kernels
        self.dtype = dtype
        self._decay = -module.A_log.detach().float().exp()
        self._shift = module.dt_bias.detach().float()
        self._shape = {
            "dtype": DTYPES[dtype],
            "num_key_heads": module.num_k_heads,
            "num_value_heads": module.num_v_heads,
            "key_dim": module.head_k_dim,
            "value_dim": module.head_v_dim,
            "taps": module.conv_kernel_size,
            "eps": module.norm.variance_epsilon,
        }

    def __call__(self, rows: torch.Tensor, parts: Parts, segments: torch.Tensor) -> torch.Tensor:
        """rows (1, T, E), all of them some segment's; segments (n, 3) of int64: first row, number
        of rows, and slot in `parts`, whose states go on. Raises Unlike."""
        mixed = self.mix(*project(self._module, rows), parts, segments)
        out: torch.Tensor = self._module.out_proj(mixed)
        return out

    def mix(
        self,
        mixed: torch.Tensor,
        gate: torch.Tensor,
        rate: torch.Tensor,
        step: torch.Tensor,
        parts: Parts,
        segments: torch.Tensor,
    ) -> torch.Tensor:
        """What `project` gave, to (1, T, value heads times dimension). Overwrites `mixed`. A row's
        result is the same bits whatever else is in the batch, and wherever segments were cut."""
        assert all(one.is_contiguous() for one in (segments, mixed))
        gate, rate, step = gate.contiguous(), rate.contiguous(), step.contiguous()
        out = torch.empty_like(gate)
        job = self.job(parts)
        job.num_threads = torch.get_num_threads()
        job.num_segments, job.num_rows = len(segments), mixed.shape[1]
        for name, one in (
            ("segments", segments), ("mixed", mixed), ("gate", gate), ("rate", rate),
            ("step", step), ("out", out),
        ):  # fmt: skip
            setattr(job, name, one.data_ptr())
        code = self._kernels.delta_rule(job)
        if code != DONE:
            raise Unlike("its heads have no kernel")
        return out

    def job(self, parts: Parts) -> DeltaJob:
        """The kernel's job but for a step's rows; its addresses are good while the states and this
        are there."""
        past, state = parts["conv"], parts["recurrent"]
        assert (past.dtype, state.dtype) == (self.dtype, torch.float32)
        assert past.is_contiguous()
        assert state.is_contiguous()
        return DeltaJob(
            **self._shape,
            past=past.data_ptr(),
            state=state.data_ptr(),
            conv_weight=self._module.conv1d.weight.data_ptr(),
            decay=self._decay.data_ptr(),
            shift=self._shift.data_ptr(),
            norm_weight=self._module.norm.weight.data_ptr(),
        )

    @property
    def state(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """What it keeps of a sequence, as StateShape says it."""
        module = self._module
        heads = (module.num_v_heads, module.head_k_dim, module.head_v_dim)
        conv = (module.conv_dim, module.conv_kernel_size)
        return {"conv": (conv, self.dtype), "recurrent": (heads, torch.float32)}

    def products(self, width: int) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of its linear layers, by their roles in the kernels' `Layer`."""
        module = self._module
        return {
            "q": (width, module.conv_dim),
            "k": (width, module.num_v_heads),
            "v": (width, module.num_v_heads),
            "z": (width, module.value_dim),
            "o": (module.value_dim, width),
        }


def project(module: Any, rows: torch.Tensor) -> Projected:
    """rows (1, T, E) to queries, keys and values in one (1, T, C); gates (1, T, value heads times
    dimension); what beta and the decay are made of, (1, T, value heads) each."""
    if not hasattr(module, "in_proj_qkvz"):
        return (
            module.in_proj_qkv(rows),
            module.in_proj_z(rows),
            module.in_proj_b(rows),
            module.in_proj_a(rows),
        )
    joint = module.in_proj_qkvz(rows), module.in_proj_ba(rows)
    *qkv, gate, rate, step = module.fix_query_key_value_ordering(*joint)
    mixed = torch.cat([one.flatten(2) for one in qkv], dim=-1)
    return mixed, gate.flatten(2), rate, step
