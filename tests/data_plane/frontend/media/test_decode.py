"""Every odd picture gives the right pixels or a clear 4xx, never a library's own error."""

import base64
import contextlib
import io
import struct
import zlib

import av
import numpy as np
import pytest
import soundfile
from PIL import Image, ImageOps

from foveal_runtime.frontend.media.decode import decode_image
from foveal_runtime.frontend.media.hashing import decode_data_url
from foveal_runtime.frontend.media.timed import _read_frames, decode_audio, decode_video
from foveal_runtime.plan.config import ModalityLimits
from foveal_runtime.plan.errors import MediaInvalid, MediaTooLarge
from tests.support.media_files import mp4

LIMITS = ModalityLimits(max_bytes=1 << 20, max_pixels=100_000, max_seconds=2.0, max_frames=8)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(data: bytes, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    image = decode_image(data, LIMITS)
    assert image.mode == "RGB"
    return image.getpixel(at)


def near(a: tuple[int, ...], b: tuple[int, ...], slack: int = 6) -> bool:
    return all(abs(x - y) <= slack for x, y in zip(a, b, strict=True))


def test_plain_rgb_is_untouched():
    assert pixel(encoded(Image.new("RGB", (9, 5), (10, 20, 30)))) == (10, 20, 30)


@pytest.mark.parametrize("kind", ["WEBP", "TIFF", "BMP", "AVIF"])
def test_nothing_of_the_file_stays_with_the_image(kind):
    """A WebP's decoder and canvas are as large as the image again."""
    image = decode_image(encoded(Image.new("RGB", (8, 8), (200, 30, 60)), kind), LIMITS)
    assert type(image) is Image.Image


def test_cmyk_jpeg():
    image = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert near(pixel(encoded(image, "JPEG", quality=95)), (255, 0, 0), 12)


def test_palette_with_and_without_transparency():
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 200, 100, 50] + [0] * 762)
    assert pixel(encoded(image)) == (200, 100, 50)
    assert pixel(encoded(image, transparency=1)) == (255, 255, 255)


def test_transparency_is_composited_on_white():
    assert pixel(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))) == (255, 255, 255)
    assert near(pixel(encoded(Image.new("RGBA", (4, 4), (0, 0, 0, 128)))), (127, 127, 127))
    assert near(pixel(encoded(Image.new("LA", (4, 4), (0, 128)))), (127, 127, 127))


def test_rgb_with_a_transparent_colour():
    data = encoded(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3))
    assert pixel(data) == (255, 255, 255)


@pytest.mark.parametrize("value", [0, 257 * 100, 65535])
def test_sixteen_bit_grey_is_scaled_not_clipped(value):
    """Pillow's own conversion clips at 255, which turns every 16-bit scan white."""
    image = Image.fromarray(np.full((4, 4), value, np.uint16))
    assert pixel(encoded(image)) == (value // 257,) * 3


def test_sixteen_bit_grey_with_a_transparent_one():
    data = encoded(Image.fromarray(np.array([[257, 514]], np.uint16)), transparency=257)
    assert [pixel(data, (x, 0)) for x in (0, 1)] == [(255, 255, 255), (2, 2, 2)]


def clear_png(depth: int, colour: int, pixels: bytes, clear: bytes, width: int) -> bytes:
    """One row of a PNG with a colour that is not seen."""
    header = struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"tRNS", clear), (b"IDAT", zlib.compress(b"\0" + pixels)))
    out = b"\x89PNG\r\n\x1a\n"
    for name, body in (*chunks, (b"IEND", b"")):
        check = struct.pack(">I", zlib.crc32(name + body))
        out += struct.pack(">I", len(body)) + name + body + check
    return out


@pytest.mark.parametrize(
    ("depth", "pixels", "greys"),
    [(1, b"\x40", [0, 255]), (2, b"\x1b", [0, 85, 170, 255]), (4, b"\x01\x2f", [0, 17, 34, 255])],
)
def test_grey_of_few_bits_with_a_transparent_one(depth, pixels, greys):
    """Of two and four bits it stayed as it was, because it was compared with scaled pixels."""
    for clear in range(len(greys)):
        level = clear if clear < 3 else 2**depth - 1
        png = clear_png(depth, 0, pixels, struct.pack(">H", level), len(greys))
        shown = np.asarray(decode_image(png, LIMITS))[0, :, 0].tolist()
        assert shown == [255 if i == clear else grey for i, grey in enumerate(greys)]


def test_sixteen_bit_rgb_with_a_transparent_colour():
    pixels = struct.pack(">6H", 65535, 0, 300, 1000, 2000, 3000)
    png = clear_png(16, 2, pixels, struct.pack(">3H", 1000, 2000, 3000), 2)
    assert np.asarray(decode_image(png, LIMITS))[0].tolist() == [[255, 0, 1], [255, 255, 255]]


def test_bilevel():
    assert pixel(encoded(Image.new("1", (4, 4), 1))) == (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_every_orientation_gives_the_pixels_of_a_turned_copy(kind):
    image = Image.effect_noise((9, 5), 90).convert("RGB")
    for orientation in (None, *range(1, 9)):
        exif = Image.Exif()
        if orientation:
            exif[0x0112] = orientation
        data = encoded(image, kind, exif=exif)
        with Image.open(io.BytesIO(data)) as file:
            copy = ImageOps.exif_transpose(file)
        found = decode_image(data, LIMITS)  # usable after its file was closed
        assert (found.size, found.mode) == (copy.size, "RGB")
        assert np.array_equal(np.asarray(found.convert("RGB")), np.asarray(copy))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_damaged_exif_refuses_no_image(orientation):
    """A width that is a text made Pillow fail when it wrote the rest, after it had turned the
    image: a good one was a 400."""
    image = Image.fromarray(np.arange(7 * 5 * 3, dtype=np.uint8).reshape(5, 7, 3))
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "Maker" * 3, orientation
    good = exif.tobytes()
    damaged = good.replace(b"\x01\x0f\x00\x02", b"\x01\x01\x00\x02")
    assert damaged != good
    turned = np.asarray(decode_image(encoded(image, exif=good), LIMITS))
    assert (turned.shape[:2] == (7, 5)) == (orientation > 4)
    found = decode_image(encoded(image, exif=damaged), LIMITS)
    assert np.array_equal(np.asarray(found), turned)


def test_unreadable_exif_leaves_the_image_unturned(monkeypatch):
    def fail(*arguments, **more):
        raise SyntaxError("not a TIFF file")

    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.new("RGB", (7, 5)), "PNG", exif=exif)
    monkeypatch.setattr(Image.Image, "getexif", fail)
    assert decode_image(data, LIMITS).size == (7, 5)
    monkeypatch.setattr(Image.Image, "getexif", lambda *_: (_ for _ in ()).throw(MemoryError()))
    with pytest.raises(MediaTooLarge, match="memory"):
        decode_image(data, LIMITS)


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (8, 4), (255, 0, 0))
    image.paste((0, 0, 255), (4, 0, 8, 4))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode_image(encoded(image, "PNG", exif=exif), LIMITS)
    assert turned.size == (4, 8)
    assert turned.getpixel((0, 0)) == (255, 0, 0)
    assert turned.getpixel((0, 7)) == (0, 0, 255)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animations_give_their_first_frame(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "lime", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)
    assert near(pixel(data), (255, 0, 0))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_files_are_clear_errors(kind, share):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(MediaInvalid):
        decode_image(data[: int(len(data) * share)], LIMITS)


def bomb(width: int, height: int) -> bytes:
    """A PNG that claims its size in 100 bytes."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        crc = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("size", [(1000, 1000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)])
def test_bombs_are_refused_on_their_header(size):
    with pytest.raises(MediaTooLarge, match="100000"):
        decode_image(bomb(*size), LIMITS)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b'{"error": 1}', "JSON"),
        (b"<svg xmlns=", "SVG"),
        (b"%PDF-1.7", "PDF"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", "HEIC; convert it to JPEG"),
        (b"\x00" * 50, "unknown"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 40, "image cannot"),
    ],
)
def test_other_things_are_named(data, match):
    with pytest.raises(MediaInvalid, match=match):
        decode_image(data, LIMITS)


def test_floating_point_pictures_are_refused():
    image = Image.fromarray(np.full((4, 4), 0.5, np.float32))
    with pytest.raises(MediaInvalid, match="floating"):
        decode_image(encoded(image, "TIFF"), LIMITS)


def test_too_many_bytes():
    with pytest.raises(MediaTooLarge):
        decode_image(b"x" * (LIMITS.max_bytes + 1), LIMITS)


def test_random_damage_never_escapes_as_another_error():
    random = np.random.default_rng(7)
    noise = random.integers(0, 255, (24, 24, 3), dtype=np.uint8)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF"):
        data = bytearray(encoded(Image.fromarray(noise), kind))
        for _ in range(60):
            damaged = bytearray(data)
            for at in random.integers(0, len(data), 8):
                damaged[at] = random.integers(0, 256)
            with contextlib.suppress(MediaInvalid, MediaTooLarge):
                assert decode_image(bytes(damaged), LIMITS).mode == "RGB"


# ---- audio and video ----
def wav(seconds: float, rate: int = 8000, channels: int = 1) -> bytes:
    times = np.arange(int(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * 220 * times).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, np.stack([tone] * channels, axis=1), rate, format="WAV")
    return buffer.getvalue()


def test_audio_is_mono_at_the_processors_rate():
    samples = decode_audio(wav(0.5, 8000, channels=2), LIMITS, 16000)
    assert samples.dtype == np.float32
    assert abs(len(samples) - 8000) < 50
    assert 0.9 < np.abs(samples).max() < 1.1


def test_audio_limits_and_errors():
    with pytest.raises(MediaTooLarge, match="lasts"):
        decode_audio(wav(2.5), LIMITS, 16000)
    with pytest.raises(MediaInvalid):
        decode_audio(b"not audio at all", LIMITS, 16000)
    with pytest.raises(MediaInvalid):
        decode_audio(b"", LIMITS, 16000)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_samples_that_no_model_can_take_are_refused(value):
    """They became log probabilities that are no numbers: a 500."""
    buffer = io.BytesIO()
    samples = np.full(100, value, np.float32)
    soundfile.write(buffer, samples, 16000, format="WAV", subtype="FLOAT")
    with pytest.raises(MediaInvalid, match="not finite or far too large"):
        decode_audio(buffer.getvalue(), LIMITS, 16000)


def test_audio_too_short_for_the_models_rate():
    with pytest.raises(MediaInvalid, match="no sample at 16000 Hz"):
        decode_audio(wav(1 / 48000, 48000), LIMITS, 16000)


def video(num_frames: int, size: tuple[int, int] = (32, 24)) -> bytes:
    return mp4(num_frames, rate=8, size=size, step=20)


def every_third(total: int, fps: float, width: int, height: int) -> list[int]:
    return list(range(0, total, 3))


def test_only_the_chosen_frames_are_kept():
    frames = decode_video(video(10), LIMITS, every_third)
    assert frames.pixels.shape == (4, 24, 32, 3)
    assert frames.indices == [0, 3, 6, 9]
    assert frames.total == 10
    means = frames.pixels.mean(axis=(1, 2, 3))
    assert np.allclose(means, [0, 60, 120, 180], atol=12)


def test_video_limits_and_errors():
    with pytest.raises(MediaTooLarge, match="lasts"):
        decode_video(video(40), LIMITS, every_third)
    with pytest.raises(MediaTooLarge, match="frames"):
        decode_video(video(12), LIMITS, lambda total, *_: list(range(total)))
    with pytest.raises(MediaTooLarge, match="pixels"):
        decode_video(video(2, (640, 480)), LIMITS, every_third)
    with pytest.raises(MediaInvalid):
        decode_video(b"not a video", LIMITS, every_third)
    with pytest.raises(MediaInvalid):
        decode_video(wav(0.2), LIMITS, every_third)


def test_the_number_of_decoding_threads_is_bounded():
    """One for each core of a large machine used up what a worker may map."""
    with av.open(io.BytesIO(video(4))) as container:
        _read_frames(container, LIMITS, every_third, 4, 8.0)
        assert container.streams.video[0].codec_context.thread_count == 4


def frames_url(*images: Image.Image) -> str:
    texts = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=95)
        texts.append(base64.b64encode(buffer.getvalue()).decode())
    return "data:video/jpeg;base64," + ",".join(texts)


def test_a_video_may_come_as_its_frames():
    """Every frame is kept, whatever would be chosen of a file: the sender has chosen already."""
    greys = [Image.new("RGB", (32, 24), (10 * n, 10 * n, 10 * n)) for n in range(4)]
    data = decode_data_url(frames_url(*greys), max_bytes=100_000)
    frames = decode_video(data, LIMITS, lambda *_: [0])
    assert frames.pixels.shape == (4, 24, 32, 3)
    assert [round(float(one.mean())) for one in frames.pixels] == [0, 10, 20, 30]
    assert (frames.indices, frames.total) == ([0, 1, 2, 3], 4)
    for cut in (len(data) - 1, 20):
        with pytest.raises(MediaInvalid):
            decode_video(data[:cut], LIMITS, lambda *_: [0])


def test_frames_that_make_no_video():
    one, other = Image.new("RGB", (32, 24)), Image.new("RGB", (24, 32))
    mixed = decode_data_url(frames_url(one, other), max_bytes=100_000)
    with pytest.raises(MediaInvalid, match="differ in size: 24x32 and 32x24"):
        decode_video(mixed, LIMITS, lambda *_: [0])
    many = decode_data_url(frames_url(*[one] * (LIMITS.max_frames + 1)), max_bytes=1_000_000)
    with pytest.raises(MediaTooLarge, match="frames, the limit is"):
        decode_video(many, LIMITS, lambda *_: [0])
    with pytest.raises(MediaInvalid, match=r"not valid base64|empty"):
        decode_data_url(frames_url(one) + ",", max_bytes=100_000)
    with pytest.raises(MediaTooLarge, match="2000 frames"):
        decode_data_url("data:video/jpeg;base64," + "," * 1999, max_bytes=100_000)
    broken = decode_data_url("data:video/jpeg;base64,aGVsbG8=", max_bytes=100)
    with pytest.raises(MediaInvalid, match="image cannot be read"):
        decode_video(broken, LIMITS, lambda *_: [0])
