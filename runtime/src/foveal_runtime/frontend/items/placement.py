"""Assignment of placeholders in a prompt to media parts. Pure; called by input_processor.

Prompts travel unexpanded: one placeholder token per item. A user's text must not smuggle in more of
them, and a chat template must not have dropped any.
"""

from __future__ import annotations

from collections.abc import Sequence

from foveal_runtime.frontend.items.prepared import MediaPart
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.rules import number, surround
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.errors import InvalidRequest, Unsupported
from foveal_runtime.plan.media import MODALITIES, Modality


def limits_of(modalities: ModalitiesConfig, modality: str) -> ModalityLimits:
    limits: ModalityLimits = getattr(modalities, modality)
    return limits


def check_counts(
    info: ProcessorInfo, modalities: ModalitiesConfig, parts: Sequence[MediaPart]
) -> None:
    """Raises Unsupported for a modality not served here, InvalidRequest for too many items."""
    for modality in MODALITIES:
        mine = [part for part in parts if part.modality == modality]
        if not mine:
            continue
        limit = limits_of(modalities, modality).max_per_prompt
        if limit == 0:
            raise Unsupported(f"{modality} input is switched off here", param=mine[0].path)
        if info.placeholder_token_id(modality) is None:
            raise Unsupported(f"this model takes no {modality} input", param=mine[0].path)
        if len(mine) > limit:
            raise InvalidRequest(
                f"the request has {len(mine)} {modality} parts, the limit is {limit}",
                param=mine[limit].path,
            )


def complete_prompt(
    info: ProcessorInfo, token_ids: list[int], parts: Sequence[MediaPart]
) -> list[int]:
    """The prompt as the model was trained on it.

    Prefix models (PaliGemma) take all placeholders first, in the order of the parts, then BOS, the
    text without placeholders and BOS, a newline; Gemma 3 takes blank lines around each item, and
    MiniCPM-V its number before it; others take the prompt as it is.
    """
    if not parts:
        return token_ids
    if table := {one.token_id: one.numbers for one in info.placeholders if one.numbers}:
        return number(token_ids, table)
    if info.newlines:
        tokens = {one.token_id for one in info.placeholders if one.method}
        return surround(token_ids, tokens, info.newline_ids, info.newlines)
    if info.prompt_rule != "prefix":
        return token_ids
    marks = [info.placeholder_token_id(part.modality) for part in parts]
    drop = {*marks, *info.prefix_ids}
    text = [token for token in token_ids if token not in drop]
    tail = len(info.suffix_ids)
    if tail and tuple(text[-tail:]) == info.suffix_ids:
        text = text[:-tail]
    return [*(m for m in marks if m is not None), *info.prefix_ids, *text, *info.suffix_ids]


def match_placeholders(
    info: ProcessorInfo, token_ids: Sequence[int], parts: Sequence[MediaPart]
) -> list[tuple[int, int]]:
    """(index into token_ids, index into parts) of each placeholder, in prompt order.

    The k-th placeholder of a modality belongs to its k-th part. Raises InvalidRequest when their
    numbers differ.
    """
    modality_of: dict[int, Modality] = {}
    for modality in MODALITIES:
        token = info.placeholder_token_id(modality)
        if token is not None:
            modality_of[token] = modality
    waiting = {m: [i for i, p in enumerate(parts) if p.modality == m] for m in MODALITIES}
    counts = {modality: len(indices) for modality, indices in waiting.items()}
    slots = []
    for at in [at for at, token in enumerate(token_ids) if token in modality_of]:
        found = modality_of[token_ids[at]]
        if not waiting[found]:
            raise InvalidRequest(
                f"the prompt has more {found} placeholders than {found} parts "
                f"({counts[found]}); the text of a message must not contain them"
            )
        slots.append((at, waiting[found].pop(0)))
    for modality, left in waiting.items():
        if left:
            raise InvalidRequest(
                f"the prompt has {counts[modality] - len(left)} {modality} placeholders for "
                f"{counts[modality]} {modality} parts; the chat template dropped some",
                param=parts[left[0]].path,
            )
    return slots
