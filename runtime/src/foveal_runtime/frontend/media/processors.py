"""One model's processor as Foveal uses it: one item alone in, one serialised item out.

Runs in media workers only (may load torch). `worker_main` is the caller. An item is a pure function
of its file, the processor and its options: it is never processed beside another one, because
processors pad neighbours to a common size.

The prompt the engine rebuilds (unexpanded ids, each placeholder replaced) must equal what the
processor itself would have made. `examine` proves that once per start with a real call, and picks
the way to find replacement ids that holds; a modality for which none holds is refused.
"""

from __future__ import annotations

import importlib.metadata
import io
import logging
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from foveal_runtime.frontend.media import decode, probe, rules, sampling
from foveal_runtime.frontend.media import options as item_options
from foveal_runtime.frontend.media.decode import decode_image
from foveal_runtime.frontend.media.hashing import short_digest
from foveal_runtime.frontend.media.layout import keep_channels_together
from foveal_runtime.frontend.media.protocol import EmbedsLayout, PlaceholderInfo, ProcessorInfo
from foveal_runtime.frontend.media.timed import READING, Frames, decode_audio, decode_video
from foveal_runtime.plan.config import ModalitiesConfig, ModalityLimits
from foveal_runtime.plan.embedder import model_type
from foveal_runtime.plan.errors import (
    FovealError,
    InvalidRequest,
    MediaInvalid,
    MediaTooLarge,
    StartupError,
)
from foveal_runtime.plan.media import MODALITIES
from foveal_runtime.wire.item import Codebook, pack_item, runs_of

log = logging.getLogger(__name__)

ITEM_FORM = b"palette-1"
"""Changes with the bytes that the same tensors become: part of every key."""

_PIXEL_LIBRARIES = ("transformers", "torchvision", "pillow", "soxr", "av")
_TEXT_FIELDS = {
    "input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "labels",
    "text_replacement_offsets", "video_metadata", "special_tokens_mask",
}  # fmt: skip
_CALL_OPTIONS = frozenset({
    "text", "images", "videos", "audio", "return_tensors", "padding", "truncation", "max_length",
    "device", "return_mm_token_type_ids", "return_text_replacement_offsets", "text_kwargs",
    "common_kwargs", "image_seq_len", "suffix", "use_image_id",
})  # fmt: skip


class ItemProcessor:
    """A loaded processor and what `examine` found out about it."""

    def __init__(self, model_path: str, limits: ModalitiesConfig) -> None:
        self.limits = limits
        self._path = model_path
        self.model_type = model_type(model_path)
        self.rule = rules.rule_for(self.model_type)
        self.processor = _load_processor(model_path)
        self.tokenizer = getattr(self.processor, "tokenizer", None)
        self.placeholders: dict[int, PlaceholderInfo] = {}
        self.codebooks: dict[str, Codebook] | None = None  # None: everything as processed
        self._heard_samples = 0  # of audio, beyond which the processor cuts it off; 0: it does not

    def examine(self, namespace: bytes) -> ProcessorInfo:
        """Finds and proves each modality's placeholder; processes the first item on the way."""
        begin = time.perf_counter()
        found = []
        for modality in range(len(MODALITIES)):
            info = self._examine(modality)
            if info is not None:
                found.append(info)
                self.placeholders[modality] = info
        self.codebooks = self._learn_codebooks()
        self._heard_samples = self._learn_heard_samples()
        return ProcessorInfo(
            identity=self._identity(namespace),
            placeholders=tuple(found),
            prompt_rule=self.rule.prompt_rule,
            prefix_ids=self._prefix_ids(),
            suffix_ids=self._suffix_ids(),
            newlines=self.rule.newlines,
            newline_ids=rules.newline_ids(self.tokenizer) if self.rule.newlines else (),
            sampling_rate=self._sampling_rate(),
            embeds=self._embeds_layout(),
            seconds=time.perf_counter() - begin,
            options=tuple(item_options.known_options(self.processor, m) for m in range(3)),
        )

    def _embeds_layout(self) -> EmbedsLayout | None:
        samples, info = [], self.placeholders.get(0)
        if info is None or not info.method:
            return None
        for shape in probe.SHAPES:
            output = self._call(0, [probe.image(*shape)], info.text, {})
            ids = self._replacement(info, output)
            samples.append((ids, runs_of(ids, info.embed_token_id), output))
        return probe.embeds_layout(self._path, samples)

    def decode(
        self,
        modality: int,
        data: bytes | memoryview,
        options: Mapping[str, Any],
        page: int = -1,
    ) -> Any:
        """The media as the processor takes it: RGB image, samples or frames; `page` is of the
        document that `data` is, unless -1. Raises InvalidRequest for options that may not be set,
        before anything is decoded."""
        limits = self._limits(modality)
        item_options.check(self.processor, modality, options, limits, _CALL_OPTIONS)
        if page >= 0:
            return decode.decode_page(data, page, limits)
        if modality == 0:
            return decode_image(data, limits)
        if modality == 2:
            return decode_audio(data, limits, self._sampling_rate() or 16000, self._heard_samples)
        frames = decode_video(data, limits, lambda *video: self._choose_frames(options, *video))
        patch = getattr(self.processor.video_processor, "temporal_patch_size", None)
        return frames.filled(int(patch or 1))

    def _learn_heard_samples(self) -> int:
        info = self.placeholders.get(2)
        if info is None or not info.method:
            return 0
        rate = self._sampling_rate() or 16000
        most = int(self.limits.audio.max_seconds * rate)
        counts = rules.audio_lengths(getattr(self.processor, "feature_extractor", None))
        return probe.heard_samples(
            lambda samples: self._fields(self._call(2, [samples], info.text, {})),
            [count for count in counts if count < most], rate,
        )  # fmt: skip

    def page_digests(self, data: bytes | memoryview) -> list[bytes]:
        """See `decode.page_digests`."""
        return decode.page_digests(data, self.limits.image)

    def process(self, modality: int, media: Any, options: Mapping[str, Any]) -> bytes:
        """The serialised item. Raises MediaInvalid, MediaTooLarge or InvalidRequest."""
        info = self.placeholders.get(modality)
        if info is None or not info.method:
            raise MediaInvalid(f"this model takes no {MODALITIES[modality]} input")
        try:
            output = self._call(modality, [media], info.text, dict(options))
            return self._pack(info, self._replacement(info, output), output)
        except FovealError:
            raise
        except MemoryError as error:
            raise MediaTooLarge(
                f"{MODALITIES[modality]} needs more memory than a media worker has"
            ) from error
        except Exception as error:  # a processor raises anything; the media or its options did it
            reason = (
                f"{MODALITIES[modality]} was refused by {type(self.processor).__name__}: "
                f"{' '.join(str(error).split())[:300] or type(error).__name__}"
            )
            if options:
                raise InvalidRequest(
                    f"{reason}; with {', '.join(sorted(options))}", param=item_options.FIELD
                ) from error
            raise MediaInvalid(reason) from error

    def _prefix_ids(self) -> tuple[int, ...]:
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return (int(bos),) if self.rule.prompt_rule == "prefix" and bos is not None else ()

    def _suffix_ids(self) -> tuple[int, ...]:
        if self.rule.prompt_rule != "prefix" or self.tokenizer is None:
            return ()
        return rules.plain_ids(self.tokenizer, "\n")

    def _limits(self, modality: int) -> ModalityLimits:
        limits: ModalityLimits = getattr(self.limits, MODALITIES[modality])
        return limits

    def _sampling_rate(self) -> int:
        audio = getattr(self.processor, "feature_extractor", None) or getattr(
            self.processor, "audio_processor", None
        )
        return int(getattr(audio, "sampling_rate", 0) or 0)

    def _identity(self, namespace: bytes) -> bytes:
        versions = []
        for name in _PIXEL_LIBRARIES:
            try:
                versions.append(f"{name}={importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                versions.append(f"{name}=none")
        parts = [
            getattr(self.processor, name, None)
            for name in ("image_processor", "video_processor", "feature_extractor")
        ]
        config = "".join(part.to_json_string() for part in parts if part is not None)
        classes = ",".join(type(part).__name__ for part in [self.processor, *parts])
        # What the limits do to media changes the item: it is processed as another file would be.
        image, video = self.limits.image, self.limits.video
        shape = f"{image.resize_pixels},{video.resize_pixels},{video.max_frames}"
        return short_digest(
            namespace, classes.encode(), config.encode(), ",".join(versions).encode(), ITEM_FORM,
            READING, shape.encode(),
        )  # fmt: skip

    def _choose_frames(self, options: Mapping[str, Any], total: int, *rest: Any) -> list[int]:
        """See `sampling.choose_frames`."""
        video, most = self.processor.video_processor, self.limits.video.max_frames
        try:
            return sampling.choose_frames(video, options, most, total, *rest)
        except (ValueError, ArithmeticError) as error:
            names = [f"{item_options.FIELD}.{name}" for name in sampling.asked_for(options)]
            raise InvalidRequest(
                f"{', '.join(names)}: a video of {total} frames cannot be sampled so: {error}",
                param=names[0],
            ) from error

    def _call(
        self, modality: int, media: list[Any], text: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """The processor on these items and this text, everything as lists and tensors."""
        if self.rule.run is not None:
            return self.rule.run(self.processor, modality, media, text, options)
        wrapped = _WRAPPERS[modality](media, options)
        if modality == 1 and self.rule.is_told_rate:
            wrapped["fps"] = wrapped["video_metadata"][0].sampled_fps
        wants_offsets = "offsets" in rules.methods_of(self.processor)
        if wants_offsets:
            wrapped["return_text_replacement_offsets"] = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # theirs, once per image
            output = self.processor(text=[text], return_tensors="pt", **wrapped, **options)
        return rules.without_padding(dict(output)) if self.rule.trims_sounds else dict(output)

    def _replacement(self, info: PlaceholderInfo, output: Mapping[str, Any]) -> list[int]:
        assert self.tokenizer is not None
        if info.method == "rule":
            return _ids(output)
        if info.method == "offsets":
            text = output["text_replacement_offsets"][0][0]["replacement"]
            text = rules.strip_newlines(text, self.rule.newlines)
            ids = rules.plain_ids(self.tokenizer, text)
            before = info.numbers[0] if info.numbers else ()
            if ids[: len(before)] != before:
                raise MediaInvalid("the item does not begin with its number in the prompt")
            return list(ids[len(before) :])
        return self._difference(info, info.text, output)

    def _unexpanded(self, info: PlaceholderInfo, text: str) -> list[int]:
        """Token ids of a prompt whose placeholders nobody has replaced."""
        assert self.tokenizer is not None
        final = rules.final_text(self.rule, self.processor, text)
        ids = [int(i) for i in self.tokenizer(final)["input_ids"]]
        return rules.number(ids, {info.token_id: info.numbers})

    def _difference(self, info: PlaceholderInfo, text: str, output: Mapping[str, Any]) -> list[int]:
        """Expanded ids minus unexpanded ids around the one placeholder of `text`."""
        assert self.tokenizer is not None
        full = _ids(output)
        plain = self._unexpanded(info, text)
        if plain.count(info.token_id) != 1:
            raise MediaInvalid(f"placeholder {info.token} is not one token of the prompt")
        at = plain.index(info.token_id)
        tail = len(plain) - at - 1
        if full[:at] != plain[:at] or (tail and full[-tail:] != plain[-tail:]):
            raise MediaInvalid("the expanded prompt differs outside the placeholder")
        return full[at : len(full) - tail]

    def _pack(
        self, info: PlaceholderInfo, replacement: list[int], output: Mapping[str, Any]
    ) -> bytes:
        runs = runs_of(replacement, info.embed_token_id)
        if not runs:
            raise MediaInvalid(f"{MODALITIES[info.modality]} takes no place in the prompt")
        fields = self._fields(output)
        if not all(array.size for _, array in fields.values()):
            raise MediaInvalid(f"{MODALITIES[info.modality]} is too short: nothing is left of it")
        return pack_item(info.modality, tuple(replacement), runs, fields, self.codebooks)

    def _fields(self, output: Mapping[str, Any]) -> dict[str, tuple[str, np.ndarray[Any, Any]]]:
        """Everything of an output that is not the prompt's."""
        unused = set(getattr(self.processor, "unused_input_names", ()) or ())
        return {
            name: _array(name, value)
            for name, value in output.items()
            if name not in _TEXT_FIELDS and name not in unused and value is not None
        }

    def _learn_codebooks(self) -> dict[str, Codebook]:
        """Which fields of images and frames can be stored short; none when that fails."""
        image = self.placeholders.get(0)
        if image is None or not image.method:
            return {}
        begin = time.perf_counter()
        try:
            books = probe.learn(lambda p: self._fields(self._call(0, [p], image.text, {})))
        except Exception as error:  # it raises anything; the long form always works
            log.warning("images travel as processed: %s: %s", type(error).__name__, error)
            return {}
        if "pixel_values" in books:  # videos go through the same arithmetic, or are not packed
            books["pixel_values_videos"] = books["pixel_values"]
        log.info("codebooks of %s after %.2f s", sorted(books), time.perf_counter() - begin)
        return books

    def _examine(self, modality: int) -> PlaceholderInfo | None:
        """Tries each method on a sample item, against one full call with two items."""
        if self._limits(modality).max_per_prompt == 0:
            return None
        base = rules.placeholder(self.rule, self.processor, modality)
        if base is None:
            return None
        most = self._limits(modality).max_per_prompt
        refused = PlaceholderInfo(
            modality, base.token, base.token_id, base.embed_token_id, base.text,
            numbers=rules.numbers(self.rule, self.processor, modality, most),
        )  # fmt: skip
        reason = ""
        for method in self.rule.methods or rules.methods_of(self.processor):
            info = msgspec.structs.replace(refused, method=method)
            try:
                reason = self._disagreement(info)
            except Exception as error:  # whatever a foreign processor raises makes it unusable
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if not reason:
                return info
            log.warning("%s %s by %s: %s", self.model_type, MODALITIES[modality], method, reason)
        return msgspec.structs.replace(refused, reason=reason)

    def _through_files(self, image: Image.Image) -> Image.Image:
        """The sample once as PNG and once as JPEG: the user's first image finds warm codecs."""
        for kind in ("PNG", "JPEG"):
            buffer = io.BytesIO()
            image.save(buffer, kind)
            image = decode_image(buffer.getvalue(), ModalityLimits())
        return image

    def _disagreement(self, info: PlaceholderInfo) -> str:
        """ "" when splicing reproduces the full processor's prompt, else what differs."""
        assert self.tokenizer is not None
        sample = probe.sample(info.modality, self._sampling_rate())
        if info.modality == 0:
            sample = self._through_files(sample)
        output = self._call(info.modality, [sample], info.text, {})
        replacement = self._replacement(info, output)
        if not runs_of(replacement, info.embed_token_id):
            return "no position of the replacement takes an encoder output"
        self._pack(info, replacement, output)
        if self.rule.run is not None:
            return ""
        for count in (1, 2) if self.rule.several else (1,):
            text = rules.probe_text(info.text, count)
            try:
                full = _ids(self._call(info.modality, [sample] * count, text, {}))
            except Exception:
                if count == 1:
                    raise
                continue  # one item a prompt is all this processor takes
            plain = self._unexpanded(info, text)
            if self.rule.newlines:
                bare = [int(i) for i in self.tokenizer(text)["input_ids"]]
                table = rules.newline_ids(self.tokenizer)
                if rules.surround(bare, {info.token_id}, table, self.rule.newlines) != plain:
                    return "newlines around the placeholder are merged in an unknown way"
            spliced: list[int] = []
            for token in plain:
                spliced.extend(replacement if token == info.token_id else [token])
            if spliced != full:
                return f"splicing gives {len(spliced)} ids for {count} item(s), not {len(full)}"
        return ""


def _images(media: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    return {"images": media}


def _videos(media: list[Frames], options: dict[str, Any]) -> dict[str, Any]:
    from transformers.video_utils import VideoMetadata

    for name in ("num_frames", "fps", "do_sample_frames"):
        options.pop(name, None)
    metadata = [
        VideoMetadata(
            total_num_frames=video.total, fps=video.fps, duration=video.total / video.fps,
            width=video.pixels.shape[2], height=video.pixels.shape[1],
            frames_indices=list(video.indices), video_backend="pyav",
        )
        for video in media
    ]  # fmt: skip
    videos = [video.pixels for video in media]
    return {"videos": videos, "video_metadata": metadata, "do_sample_frames": False}


def _audio(media: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    return {"audio": media}


_WRAPPERS = {0: _images, 1: _videos, 2: _audio}


def _ids(output: Mapping[str, Any]) -> list[int]:
    ids = output["input_ids"]
    row = ids[0]
    return [int(i) for i in (row.tolist() if hasattr(row, "tolist") else row)]


def _array(name: str, value: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """(torch dtype name, array) of anything a processor returns."""
    import torch

    if isinstance(value, (list, tuple)):
        parts = [_array(name, part) for part in value]
        if not parts:
            raise MediaInvalid(f"field {name} is empty")
        return parts[0][0], np.stack([array for _, array in parts])
    tensor = torch.as_tensor(value).detach().cpu().contiguous()
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return kind, tensor.numpy()


def _load_processor(model_path: str) -> Any:
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(
            model_path, trust_remote_code=False, local_files_only=True
        )
        rules.complete(processor, Path(model_path))
        keep_channels_together(processor)
        return processor
    except Exception as error:  # OSError, ValueError, ImportError, KeyError, ...: all say "cannot"
        raise StartupError(
            f"cannot load the processor of {model_path}: {' '.join(str(error).split())[:400]}"
        ) from error
