"""Tiny cases of encoders: each token sees all of its prompt, and there is nothing but vectors."""

from __future__ import annotations

from typing import Any

import transformers as hf

from tests.support.models.tiny_checkpoints import CASES, TEXT, Case

_SIZES = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
NAMES = ("bert", "camembert", "distilbert", "nomic_bert", "roberta", "xlm_roberta")


def encoder_case(kind: str, **changes: Any) -> Case:
    """Prompts are computed whole, so a step takes all of one."""
    return Case(lambda: getattr(hf, kind)(**{**_SIZES, **changes}), budget=64)


CASES.update(
    {
        "bert": encoder_case("BertConfig", type_vocab_size=2),
        "distilbert": encoder_case(
            "DistilBertConfig", dim=32, hidden_dim=48, n_layers=3, n_heads=4
        ),
        "nomic_bert": encoder_case("NomicBertConfig", type_vocab_size=2),
        # Positions count from behind the padding's id.
        "camembert": encoder_case("CamembertConfig", pad_token_id=5, type_vocab_size=1),
        "roberta": encoder_case("RobertaConfig", pad_token_id=1, type_vocab_size=1),
        "xlm_roberta": encoder_case("XLMRobertaConfig", pad_token_id=1, type_vocab_size=1),
    }
)
