"""Content parts of messages as media: what each claims to be and where its content is.

Read by the chat template, which writes a placeholder for each, and by the request service, which
has documents read before that. Nothing is fetched or decoded here. `join_messages` joins messages
of one role for templates that do not take them as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foveal_runtime.frontend.items.prepared import MediaPart
from foveal_runtime.frontend.protocol.body_text import MediaText
from foveal_runtime.frontend.protocol.messages import (
    AudioUrlPart,
    DocumentPart,
    FilePart,
    ImageEmbedsPart,
    ImagePart,
    InputFilePart,
    MediaContent,
    Message,
    VideoPart,
)
from foveal_runtime.plan.errors import InvalidRequest, Unsupported
from foveal_runtime.plan.media import Modality

_DOCUMENT_TYPES = ("application/pdf", "application/x-pdf", "application/octet-stream", "")


def documents_of(messages: Sequence[Message]) -> dict[str, MediaPart]:
    """The documents of the messages by the path of their part. Raises InvalidRequest."""
    return {
        (path := f"messages[{number}].content[{index}]"): _document(part, path)
        for number, message in enumerate(messages)
        if message.content is not None and not isinstance(message.content, str)
        for index, part in enumerate(message.content)
        if isinstance(part, DocumentPart)
    }


def _document(part: FilePart | InputFilePart, path: str) -> MediaPart:
    """Raises InvalidRequest when the part has no document that this server can read."""
    where = f"{path}.file" if isinstance(part, FilePart) else path
    given = part.file if isinstance(part, FilePart) else part
    if given.file_id is not None:
        raise Unsupported(
            f"{where}.file_id names a file that a server keeps, and this one keeps none: send the "
            "document as file_data",
            param=f"{where}.file_id",
        )
    url, name = (given.file_url, "file_url") if given.file_url else (given.file_data, "file_data")
    if not url:
        raise InvalidRequest(f"{where}.file_data is missing", param=f"{where}.file_data")
    head = url[:128].lower()
    if not head.startswith(("data:", "http:", "https:", "file:")):
        url = f"data:application/pdf;base64,{url}"
    elif head.startswith("data:"):
        kind = head[5:].partition(",")[0].partition(";")[0].strip()
        if kind not in _DOCUMENT_TYPES:
            raise Unsupported(
                f"{where}.{name} is {kind}; only application/pdf is served: send text as a text "
                "part and images as image parts",
                param=f"{where}.{name}",
            )
    return MediaPart(modality="image", url=url, path=f"{where}.{name}")


def media_part(part: MediaContent, path: str) -> MediaPart:
    """Raises InvalidRequest when the part has neither content nor uuid."""
    modality: Modality
    url: MediaText | None = None
    if isinstance(part, ImagePart):
        modality, field_name = "image", "image_url"
        url = part.image_url.url if part.image_url is not None else None
    elif isinstance(part, ImageEmbedsPart):
        modality, field_name, file = "image", "image_embeds", part.image_embeds
        url = f"data:application/octet-stream;base64,{file}" if file is not None else None
    elif isinstance(part, VideoPart):
        modality, field_name = "video", "video_url"
        url = part.video_url.url if part.video_url is not None else None
    elif isinstance(part, AudioUrlPart):
        modality, field_name = "audio", "audio_url"
        url = part.audio_url.url if part.audio_url is not None else None
    else:
        modality, field_name = "audio", "input_audio"
        audio = part.input_audio
        url = f"data:audio/{audio.format};base64,{audio.data}" if audio is not None else None
    if not url and part.uuid is None:
        raise InvalidRequest(
            f"{path}.{field_name} is missing, and so is the uuid of a medium that was sent before",
            param=f"{path}.{field_name}",
        )
    is_embeds = isinstance(part, ImageEmbedsPart)
    return MediaPart(
        modality=modality, url=url or None, uuid=part.uuid, path=path, is_embeds=is_embeds
    )


def join_messages(
    messages: Sequence[Message],
    order: Sequence[int],
    plain: Sequence[dict[str, Any]],
    *,
    one_system: bool,
) -> list[dict[str, Any]]:
    """`plain` are the messages as the template gets them, in `order`. Many templates demand that
    roles alternate: the user's messages become one where a result of a tool is among them, whose
    role became `user`, or where a system message stood between them. With `one_system`, the system
    messages at the beginning are one, too."""
    out: list[dict[str, Any]] = []
    was_result, number = False, -1
    for at, one in zip(order, plain, strict=True):
        is_result = one["role"] == "user" and messages[at].role in ("tool", "function")
        gap = "\n\n" if one_system and one["role"] == "system" else ""
        if one["role"] == "user" and (is_result or was_result or at != number + 1):
            gap = "\n"
        if gap and out and out[-1]["role"] == one["role"]:
            content = joined(out[-1]["content"], one["content"], gap)
            out[-1] = {**one, **out[-1], "content": content}
        else:
            out.append(one)
        was_result, number = is_result, at
    return out


def said_by_user(plain: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For templates without system messages: the first one begins the user's turn after it, as
    Gemma 3's own template has it."""
    system, *rest = plain
    if not rest or rest[0]["role"] != "user":
        return [{**system, "role": "user"}, *rest]
    content = joined(system["content"], rest[0]["content"], "\n\n")
    return [{**rest[0], "content": content}, *rest[1:]]


def joined(before: Any, after: Any, gap: str) -> Any:
    """Two contents as one, both texts or both parts, with `gap` between two texts."""
    if isinstance(before, str):
        return f"{before}{gap}{after}" if before and after else before or after
    if before and after and before[-1]["type"] == after[0]["type"] == "text":
        text = joined(before[-1]["text"], after[0]["text"], gap)
        return [*before[:-1], {"type": "text", "text": text}, *after[1:]]
    return [*before, *after]
