"""The chat templates of a checkpoint, by the files that hold them, or the one given instead.

Read once per HTTP process; `chat_template` renders them. Their order is transformers' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from foveal_runtime.frontend.text.probed_template import TEMPLATE_ERRORS
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import StartupError

_PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
"""Where releases of transformers have written a processor's template, beside chat_template.jinja,
which the tokenizer reads."""


class Templates(NamedTuple):
    """`default` is None where the checkpoint has none: text completions still work. `tools` is the
    one for requests with tools, where that is another (Hermes, Command R)."""

    default: str | None
    tools: str | None = None


def load_templates(model_path: str | Path, tokenizer: TextTokenizer, given: str = "") -> Templates:
    """The template that is given, else the processor's before the tokenizer's: for multimodal
    models the former knows the media. Raises StartupError for a file that cannot be read, and for
    a given template that is none."""
    if given:
        return Templates(_checked(given, tokenizer))
    for path in (Path(model_path) / name for name in _PROCESSOR_FILES):
        if not path.is_file():
            continue
        try:
            found = _by_name(json.loads(path.read_bytes()).get("chat_template"))
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise StartupError(f"{path} cannot be read for a chat template: {error}") from error
        if found.default is not None:
            return found
    return _by_name(tokenizer.hf.chat_template)


def _checked(template: str, tokenizer: TextTokenizer) -> str:
    try:
        said = [{"role": "user", "content": "x"}]
        tokenizer.hf.apply_chat_template(said, chat_template=template, tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"the chat template's line {error.lineno}: {error.message}") from error
    except TEMPLATE_ERRORS:
        pass  # it refuses this conversation, which says nothing of others
    return template


def _by_name(template: Any) -> Templates:
    if not isinstance(template, dict):
        return Templates(template if isinstance(template, str) else None)
    default, tools = (
        one if isinstance(one, str) else None for one in map(template.get, ("default", "tool_use"))
    )
    return Templates(default, tools if default is not None else None)
