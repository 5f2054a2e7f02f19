"""Media and options that cost more than they seem to: options, audio, video, turns."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile

from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.media import options, timed
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    FovealError,
    InvalidRequest,
    MediaTooLarge,
)
from foveal_runtime.plan.sampling import SamplingParams


class Kwargs:
    size: dict[str, int]
    do_resize: bool
    do_normalize: bool
    image_mean: list[float]
    max_pixels: int


class Part:
    valid_kwargs = Kwargs

    def to_dict(self) -> dict[str, Any]:
        return {"size": {"shortest_edge": 64}, "do_resize": True, "max_pixels": 4096}

    def sample_frames(self, metadata: Any, num_frames: int = 0, fps: float = 1.0) -> list[int]:
        return list(range(num_frames or int(metadata.duration * fps)))


PROCESSOR = SimpleNamespace(image_processor=Part(), video_processor=Part())


def check(modality: int = 0, **given: Any) -> None:
    options.check(PROCESSOR, modality, given, ModalityLimits(), frozenset({"text"}))


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"shortest_edge": 8000}},
        {"size": {"shortest_edge": 0}},
        {"size": {"height": 64, "width": 64}},
        {"size": "64"},
        {"size": 1e300},
        {"do_resize": False},
        {"max_pixels": 4097},
        {"max_pixels": [4096, 1 << 60]},
        {"longest_edge": 10},
        {"text": "x"},
    ],
    ids=repr,
)
def test_options_that_enlarge_an_item_are_refused_by_name(given: dict[str, Any]) -> None:
    """A 64x64 PNG with shortest_edge 8000 held the only worker for 40 s and committed 768 MB to
    the shared cache; an unknown option was taken without a word."""
    name = next(iter(given))
    with pytest.raises(InvalidRequest, match=name) as caught:
        check(**given)
    assert caught.value.param == f"mm_processor_kwargs.{name}"


def test_options_that_cost_nothing_more_are_taken() -> None:
    check()
    check(size={"shortest_edge": 32}, max_pixels=1000, do_resize=True)
    check(do_normalize=False, image_mean=[0.5, 0.5, 0.5])
    check(1, num_frames=8, fps=2.0)


def test_items_get_the_options_that_their_modality_knows() -> None:
    """An image beside a video refused `fps`, and a video beside it options of images."""
    known = (frozenset({"size", "crop"}), frozenset({"size", "fps"}), frozenset())
    given = {"size": 1, "fps": 2, "crop": 3}
    assert options.by_modality(given, {0, 1}, known) == {
        0: {"size": 1, "crop": 3},
        1: {"size": 1, "fps": 2},
    }
    nested = {"size": 1, "images_kwargs": {"size": 2}, "videos_kwargs": {"fps": 3}}
    assert options.by_modality(nested, {0, 1}, known) == {0: {"size": 2}, 1: {"size": 1, "fps": 3}}
    assert options.by_modality(given, (), known) == {}
    assert options.by_modality(given, {0}, ()) == {0: given}
    for name, value in (("fps", 2), ("typo", 2), ("videos_kwargs", {"fps": 2})):
        handed = options.by_modality({name: value}, {0, 2}, known)
        assert handed == {0: {name: value}, 2: {name: value}}, "to be refused"
    for group in ("videos_kwargs", "images_kwargs"):
        with pytest.raises(InvalidRequest, match="media that the request has") as caught:
            check(**{group: 2})
        assert caught.value.param == f"mm_processor_kwargs.{group}"


@pytest.mark.parametrize("given", [{"num_frames": 10**9}, {"fps": 0}, {"fps": True}, {"fps": 1e9}])
def test_frames_are_bounded_before_they_are_chosen(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="at most"):
        check(1, **given)


def flac(num_frames: int, channels: int) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.zeros((num_frames, channels), np.float32), 48_000, format="FLAC")
    return out.getvalue()


def test_silence_in_many_channels_is_read_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """468 kB of FLAC became 2 GiB: all channels of all samples at once."""
    sizes: list[int] = []
    read = soundfile.SoundFile.read

    def spy(self: Any, frames: int = -1, **more: Any) -> Any:
        block = read(self, frames, **more)
        sizes.append(block.size)
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", spy)
    samples = timed.decode_audio(flac(200_000, 8), ModalityLimits(), 48_000)
    assert samples.shape == (200_000,)
    assert max(sizes) <= 8 * 16_384


def test_samples_times_channels_are_bounded() -> None:
    limits = ModalityLimits(max_seconds=0.1)
    assert len(timed.decode_audio(flac(4800, 8), limits, 48_000)) == 4800
    data = bytearray(flac(4800, 8))
    few = ModalityLimits(max_seconds=0.05)
    with pytest.raises(MediaTooLarge):
        timed.decode_audio(bytes(data), few, 48_000)


async def test_a_value_that_no_request_can_use_is_not_committed(
    start_input: Any, picture: Any
) -> None:
    """The processed item went to the cache, and was refused afterwards."""

    class Small:
        def lookup_item(self, mm_hash: bytes) -> None:
            return None

        def lookup_alias(self, alias: bytes) -> None:
            return None

        def max_model_len(self) -> int:
            return 5

        def has_cache(self) -> bool:
            return False

        def put(self, items: Any, values: Any) -> int:
            return 0

    inputs = await start_input(knowledge=Small())
    part = MediaPart(modality="image", data=picture(), path="messages[0].content[0]")
    chosen = PrepareOptions(request_id="r", sampling=SamplingParams(max_tokens=1))
    with pytest.raises(ContextLengthExceeded):
        await inputs.prepare([4], [part], chosen)
    assert len(inputs.cache) == 0


async def test_clients_take_turns_at_the_workers(
    start_workers: Any, picture: Any, tmp_path: Path
) -> None:
    """Whoever sent a hundred items first was served a hundred times first."""
    pool, _ = await start_workers(1)
    gate = tmp_path / "gate"
    done: list[str] = []

    async def ask(client: str, data: bytes) -> None:
        await pool.process(0, b"{}", data, client)
        done.append(client)

    first = asyncio.create_task(ask("flood", f"!slow:{gate}".encode()))
    while not pool.num_busy:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    flood = [asyncio.create_task(ask("flood", picture(seed))) for seed in range(6)]
    while pool.queue_length < 6:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    other = asyncio.create_task(ask("other", picture(99)))
    while pool.queue_length < 7:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    gate.touch()
    await asyncio.gather(first, other, *flood)
    assert "other" in done[:3]


async def test_errors_of_options_name_their_field(start_workers: Any) -> None:
    """The field at fault was lost on the way from the worker."""
    pool, _ = await start_workers(1)
    with pytest.raises(FovealError) as caught:
        await pool.process(0, b"{}", b"!refuse:mm_processor_kwargs.size")
    assert caught.value.param == "mm_processor_kwargs.size"
