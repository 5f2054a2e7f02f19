"""Rotary positions whose scaling follows the longest position of a call, settled once.

Used by the loader. transformers looks at the longest position of every call, which here is a step
of several requests: one request must not decide how another's positions are scaled, nor may the
scaling of keys that are already in the KV cache change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def settle_rope(text: Any, max_model_len: int = 0) -> None:
    """Changes the rotary parameters of a text configuration to ones that depend on a token's own
    position alone, for requests of at most `max_model_len` tokens (0: max_position_embeddings).

    dynamic: scaled only past max_position_embeddings, where no request comes (InternVL3). With
        `alpha` (Hunyuan) transformers itself takes a fixed base; that is left as it is.
    longrope: the long factors where requests may be longer than the length that the model was
        first trained for, the short ones otherwise; vLLM decides by the same rule.
    llama_4_scaling_beta (Ministral 3): queries are scaled from original_max_position_embeddings
        on. Where no request comes that far nothing is, and layers may be computed in faster ways.
    """
    longest = max_model_len or int(getattr(text, "max_position_embeddings", 0) or 0)
    for rope in _parameters(text):
        original = rope.get("original_max_position_embeddings") or 0
        if rope.get("rope_type") == "dynamic" and not rope.get("alpha"):
            rope["rope_type"] = "default"
            rope.pop("factor", None)
        elif rope.get("rope_type") == "longrope" and original:
            factors = rope["long_factor" if longest > original else "short_factor"]
            rope["long_factor"] = rope["short_factor"] = factors
        if rope.get("llama_4_scaling_beta") and longest <= original:
            rope["llama_4_scaling_beta"] = 0.0


def _parameters(text: Any) -> Iterator[dict[str, Any]]:
    """Of all layers, or of each kind of layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    yield from (rope, *(part for part in rope.values() if isinstance(part, dict)))
