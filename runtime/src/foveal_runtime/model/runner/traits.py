"""The model traits that the scheduler works by.

Used by the runner and by the profiler, which has no runner. Never looks at weights.
"""

from __future__ import annotations

from pathlib import Path

import transformers

from foveal_runtime.engine.types.step import ModelTraits
from foveal_runtime.model.checkpoint.loader import LoadedModel
from foveal_runtime.model.layers.layer_parts import deepstack_levels
from foveal_runtime.plan.embedder import longest_input
from foveal_runtime.plan.sampling import grammar_version


def read_traits(loaded: LoadedModel, state_bytes: int = 0) -> ModelTraits:
    """What the scheduler must know, from the model's configuration and its adapter."""
    text, adapter = loaded.text_config, loaded.adapter
    levels = 1 + deepstack_levels(loaded)
    eos = getattr(loaded.generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(text, "eos_token_id", None)
    ids = (eos,) if isinstance(eos, int) else tuple(eos or ())
    multimodal = bool(adapter.encoders)
    longest = int(text.max_position_embeddings)
    if adapter.is_encoder:
        longest = longest_input(loaded.path, longest - adapter.position_offset)
    has_grammars = not adapter.is_encoder and (Path(loaded.path) / "tokenizer.json").is_file()
    return ModelTraits(
        vocab_size=int(text.vocab_size),
        max_position=longest,
        eos_token_ids=ids,
        is_multimodal=multimodal,
        bidirectional=adapter.bidirectional,
        embed_width=int(text.hidden_size) if multimodal else 0,
        embed_levels=levels,
        embed_bytes=int(text.hidden_size) * levels * loaded.dtype.itemsize if multimodal else 0,
        embed_kind=f"{loaded.dtype} transformers {transformers.__version__}",
        value_bytes=loaded.dtype.itemsize,
        grammars=grammar_version() if has_grammars else "",
        state_bytes=state_bytes,
        generates=not adapter.is_encoder,
    )
