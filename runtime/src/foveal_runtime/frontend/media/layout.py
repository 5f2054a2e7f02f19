"""Pixels in the order in which images come and the library resizes: the channels of one together.

`processors` applies it to what it loads. transformers copies each image into planes, channel by
channel, which torch's resize then puts together again: a tenth of a worker's time for a megapixel.
As a view, the same pixels give the same tensors, bit by bit: resizing is integer arithmetic a
channel, and what follows looks at each element alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

_STEPS = (
    "process_image", "_preprocess", "resize", "center_crop", "pad", "rescale_and_normalize",
    "rescale", "normalize",
)  # fmt: skip


def keep_channels_together(processor: Any) -> None:
    """Of a processor whose steps are all the library's own; another may count on planes."""
    from transformers.image_processing_backends import TorchvisionBackend

    image = getattr(processor, "image_processor", None)
    kind: Any = type(image)
    if not isinstance(image, TorchvisionBackend) or any(
        getattr(kind, name) is not getattr(TorchvisionBackend, name) for name in _STEPS
    ):
        return

    def process_image(self: Any, image: Any, *more: Any, **options: Any) -> Any:
        if not isinstance(image, Image.Image) or image.mode != "RGB" or options.get("device"):
            return kind.process_image(self, image, *more, **options)
        import torch

        return torch.from_numpy(np.array(image)).permute(2, 0, 1)

    # Its name is in the configuration, and so in every key.
    image.__class__ = type(kind.__name__, (kind,), {"process_image": process_image})
