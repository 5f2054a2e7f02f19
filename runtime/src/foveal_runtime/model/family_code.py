"""Code of single model families that the table of adapters names, where data is not enough.

Encoders that are called otherwise than others, embeddings and inputs of layers that are not one
table's, corrections of what depends on a token's place in a call. Torch is imported only where it
computes: `foveal serve` asks the table before anything is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

    from foveal_runtime.wire.item import Item


def qwen2_audio(core: Any, input_features: torch.Tensor, feature_attention_mask: Any) -> Any:
    """Qwen2-Audio has no feature method: masked tower, projector, the valid rows of each clip."""
    import torch
    from transformers.masking_utils import create_bidirectional_mask

    tower = core.audio_tower
    counts, lengths = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
    num_frames = (input_features.shape[-1] - 2) // 2 + 1
    frames = torch.arange(num_frames, device=counts.device)
    mask = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(len(input_features), num_frames, 1),
        attention_mask=(frames < counts[:, None]).long(),
    )
    hidden = tower(input_features, attention_mask=mask, return_dict=True).last_hidden_state
    projected = core.multi_modal_projector(hidden)
    return [rows[:length] for rows, length in zip(projected, lengths.tolist(), strict=True)]


def llama4_temperature(module: Any, query: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Llama 4 scales queries of layers without rope by the token's index in the call."""
    if module.use_rope or not module.attn_temperature_tuning:
        return query
    import torch

    def scale(index: torch.Tensor) -> torch.Tensor:
        steps = torch.floor((index.float() + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    index = torch.arange(len(positions), device=positions.device)
    ratio = scale(positions) / scale(index)
    return (query * ratio[:, None, None]).to(query.dtype)


def llama4_image(core: Any, pixel_values: torch.Tensor) -> Any:
    """Llama 4 projects outside of its feature method."""
    return core.multi_modal_projector(core.get_image_features(pixel_values).last_hidden_state)


def video_llava_image(core: Any, pixel_values_images: torch.Tensor) -> Any:
    """Video-LLaVA's processor names the field otherwise than the feature method."""
    return core.get_image_features(pixel_values_images, return_dict=True).pooler_output


def gemma4_audio(core: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor) -> Any:
    """Gemma 4 leaves padding among its outputs and says which they are."""
    is_sound = input_features_mask.bool()
    found = core.get_audio_features(input_features, is_sound, return_dict=True)
    return [
        rows[mask] for rows, mask in zip(found.pooler_output, found.attention_mask, strict=True)
    ]


def gemma3n_audio(
    core: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor
) -> Any:
    """Gemma 3n fills every clip up to the same number of rows with one learned row."""
    import torch

    is_padding = ~input_features_mask.bool()
    found = core.get_audio_features(input_features, is_padding, return_dict=True)
    rows, is_padding = found.pooler_output, found.audio_mel_mask
    last = torch.full((1, 1), core.vocab_size - 1, device=rows.device)
    filler = core.embed_audio(input_ids=last)
    rows = torch.where(is_padding[..., None], filler, rows)
    missing = core.config.audio_soft_tokens_per_image - rows.shape[1]
    return torch.cat([rows, filler.expand(len(rows), missing, -1)], dim=1)


def gemma3n_tokens(core: Any, ids: torch.Tensor) -> torch.Tensor:
    """Gemma 3n embeds the marks beside images and sounds as it embeds those."""
    import torch

    embeds: torch.Tensor = core.get_input_embeddings()(ids.clamp(max=core.vocab_size - 1))
    for tower in (core.embed_vision, core.embed_audio):
        first = tower.vocab_offset
        is_own = (ids >= first) & (ids < first + tower.vocab_size)
        if ids.device.type != "cpu" or is_own.any():  # a device would have to be waited for
            own = tower(input_ids=torch.where(is_own, ids, first))
            embeds = torch.where(is_own[:, None], own.to(embeds.dtype), embeds)
    return embeds


def ovis2_tokens(core: Any, ids: torch.Tensor) -> torch.Tensor:
    """Ovis 2 takes the marks around and between tiles from its table of visual words."""
    import torch

    embeds: torch.Tensor = core.get_input_embeddings()(ids)
    table = core.visual_embeddings_table.weight[-core.vision_tower.num_visual_indicator_tokens :]
    for mark, row in zip(core.visual_indicator_token_ids, table, strict=True):
        embeds = torch.where((ids == mark)[:, None], row.to(embeds.dtype), embeds)
    return embeds


def scaled_tokens(core: Any, ids: torch.Tensor) -> torch.Tensor:
    """Falcon-H1 scales what it looks up, and not what it is given."""
    embeds: torch.Tensor = core.get_input_embeddings()(ids) * core.embedding_multiplier
    return embeds


def ernie_experts(config: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """ERNIE 4.5 VL has other experts for images, videos and the marks around them; for marks in
    answers, too, since an answer is part of the next prompt."""
    import torch

    if ids.is_meta:
        return {}  # how many they are cannot be asked
    names = ("", "start_", "end_")
    seen = [getattr(config, f"{kind}_{n}token_id") for kind in ("image", "video") for n in names]
    is_seen = torch.isin(ids, torch.tensor(seen, device=ids.device))
    return {"moe_mm_token_type_ids": is_seen[None].int()}


def granite4_image(core: Any, pixel_values: torch.Tensor, image_sizes: torch.Tensor) -> Any:
    """Granite 4 Vision has zeros in the prompt, and adds all of an image before its layers."""
    import torch

    found = core.get_image_features(pixel_values, image_sizes, return_dict=True).deepstack_features
    levels = [level for _, level in found]
    return [[torch.zeros_like(one) for one in levels[0]], *levels]


def granite4_layers(config: Any) -> Sequence[int]:
    return [*(layer for _, layer in config.deepstack_layer_map), *config.spatial_target_layers]


def moss_audio(core: Any, input_features: torch.Tensor, input_features_mask: torch.Tensor) -> Any:
    """MOSS's method takes a mask of the samples, too, and does nothing with it."""
    found = core.get_audio_features(input_features, input_features_mask, None, return_dict=True)
    return found.pooler_output


def omni_positions(
    config: Any, length: int, places: Sequence[tuple[int, Item]], has_fractions: bool
) -> np.ndarray:
    """Rope positions f64 (3, length) of Qwen's Omni thinkers, as their get_rope_index has them.

    Text and sounds take a position a token. Images and videos stand in time, height and width from
    the position after what was before; time counts `position_id_per_seconds` of the frames' own
    clock. Theirs finds items by the marks around them, ours by their places.
    """
    import numpy as np

    found = np.empty((3, length))
    done, first = 0, 0.0
    for start, item in places:
        frames, *sides = item.fields[f"{item.modality}_grid_thw"].numpy()[0].tolist()
        clock = np.arange(frames, dtype=np.float32)
        if item.modality == "video":
            seconds = item.fields["video_second_per_grid"].numpy().item()
            if not 0 < seconds < 1e6:
                raise ValueError(f"video_second_per_grid is {seconds}")
            clock *= seconds
        clock *= config.position_id_per_seconds
        sides = [np.arange(side // config.vision_config.spatial_merge_size) for side in sides]
        axes = np.meshgrid(clock if has_fractions else np.floor(clock), *sides, indexing="ij")
        rows = np.stack([axis.reshape(-1) for axis in axes])
        found[:, done:start] = first + np.arange(start - done)
        done, first = start + rows.shape[1], first + start - done
        found[:, start:done] = first + rows
        first += rows.max() + 1
    found[:, done:] = first + np.arange(length - done)
    return found


def perception_lm_video(core: Any, pixel_values_videos: torch.Tensor) -> Any:
    """PerceptionLM's videos are images."""
    return core.get_image_features(pixel_values_videos, return_dict=True).pooler_output


CUSTOM_ENCODERS: dict[str, Callable[..., Any]] = {
    "gemma3n_audio": gemma3n_audio,
    "gemma4_audio": gemma4_audio,
    "granite4_image": granite4_image,
    "llama4_image": llama4_image,
    "moss_audio": moss_audio,
    "perception_lm_video": perception_lm_video,
    "qwen2_audio": qwen2_audio,
    "video_llava_image": video_llava_image,
}
