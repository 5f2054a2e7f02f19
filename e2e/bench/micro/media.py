"""What the identity of a picture costs a frontend: hash and lookup, repeated and new, by size.

    python -m e2e.bench.micro.media

A repeated data URL is hashed as text and found; a new one is also base64-decoded and its file
hashed; then its key is made. Limits: one BLAKE3 pass (repeated), BLAKE3 over text and file plus a
decoding (new). Decoding the picture and the processor, which a hit avoids, stand beside them.
"""

from __future__ import annotations

import base64
import io
import random

from PIL import Image

from e2e.bench.micro.common import best_seconds, hash_rate, show
from foveal_runtime.frontend.media import hashing

SIZES = [10_000, 100_000, 300_000, 1_000_000, 4_000_000]


def one_size(num_bytes: int) -> None:
    file = random.Random(num_bytes).randbytes(num_bytes)
    url = "data:image/png;base64," + base64.b64encode(file).decode()
    texts = hashing.UrlTextMap()
    for number in range(10_000):  # a lookup must not depend on how many are known
        texts.commit(number.to_bytes(32, "big"), b"d" * 32, 1)

    def key(digest: bytes) -> bytes:
        return hashing.mm_hash(digest, modality=0, identity=b"i" * 16, options={})

    def new() -> bytes:
        data = hashing.decode_data_url(url, max_bytes=1 << 30)
        digest = hashing.content_digest(data)
        texts.commit(hashing.UrlTextMap.key(url), digest, len(data))
        return key(digest)

    def repeated() -> bytes:
        found = texts.lookup(hashing.UrlTextMap.key(url))
        assert found is not None
        return key(found[0])

    new()
    text_pass = len(url) / hash_rate(len(url))
    file_pass = num_bytes / hash_rate(num_bytes)
    encoded = url.partition(",")[2].encode()
    decode = best_seconds(lambda: base64.b64decode(encoded))
    label = f"{num_bytes / 1000:.0f} kB file"
    show(f"{label}, repeated: key from a data URL", best_seconds(repeated), "BLAKE3", text_pass)
    show(f"{label}, new: the same, decoded and hashed", best_seconds(new),
         "BLAKE3 and base64", text_pass + file_pass + decode)  # fmt: skip


def avoided() -> None:
    """Decoding alone, without the processor: the least that a hit saves."""
    image = Image.effect_noise((1000, 1000), 60).convert("RGB")
    file = io.BytesIO()
    image.save(file, "JPEG")
    data = file.getvalue()
    seconds = best_seconds(lambda: Image.open(io.BytesIO(data)).load())
    one_pass = len(data) / hash_rate(len(data))
    show(f"decoding a 1-megapixel JPEG of {len(data) / 1000:.0f} kB, for comparison", seconds,
         "BLAKE3 of its file", one_pass)  # fmt: skip


def main() -> None:
    for size in (10_000, 1_000_000):
        print(f"BLAKE3 of {size / 1000:.0f} kB: {hash_rate(size) / 1e9:.2f} GB/s")
    for size in SIZES:
        one_size(size)
    avoided()


if __name__ == "__main__":
    main()
