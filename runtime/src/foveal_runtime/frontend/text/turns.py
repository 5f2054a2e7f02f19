"""A request's turn: which output the model may write, and how it is read.

Called by chat.py once the prompt is rendered. Joins what the chat template says about the model
with what the request asks for.
"""

from __future__ import annotations

import re
from typing import Any

from foveal_runtime.frontend.grammars.compiler import Compiled
from foveal_runtime.frontend.grammars.formats import FORMATS
from foveal_runtime.frontend.grammars.reader import TurnFormat
from foveal_runtime.frontend.protocol.constraints import Wanted
from foveal_runtime.frontend.protocol.requests import ChatCompletionRequest
from foveal_runtime.frontend.protocol.tools import Calls, schema_of
from foveal_runtime.frontend.text.chat_template import ChatTemplate
from foveal_runtime.frontend.text.tokenizer import TextTokenizer
from foveal_runtime.plan.errors import InvalidRequest, Unsupported

_EFFORTS = re.compile(r"\b(enable_thinking|reasoning_effort)\b")


def template_variables(request: ChatCompletionRequest, template: ChatTemplate) -> dict[str, Any]:
    """Variables of the chat template. Raises Unsupported for an effort that it cannot take."""
    found: dict[str, Any] = {}
    effort, source = request.reasoning_effort, template.source or ""
    if effort is not None:
        if _EFFORTS.search(source):
            found = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        elif effort not in ("none", "medium"):
            raise Unsupported(
                f"reasoning_effort is {effort!r}; this model's chat template takes no effort",
                param="reasoning_effort",
            )
    budget = request.thinking_token_budget
    if budget is not None and "thinking_budget" in source:
        found["thinking_budget"] = budget
    return found | (request.chat_template_kwargs or {})


def plan_turn(
    request: ChatCompletionRequest,
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    calls: Calls | None,
    prompt: str,
    answer: Compiled,
) -> tuple[TurnFormat | None, Wanted | None]:
    """(how outputs are read, what binds them; None where `answer` alone does). Raises
    InvalidRequest."""
    row, think = template.tool_format if calls is not None else None, template.thinking
    if calls is not None and row is None:
        raise InvalidRequest(
            "the model's chat template writes tool calls in a form that is not known; start the "
            f"server with --tool-format and one of {', '.join(FORMATS)}",
            param="tools",
        )
    budget = request.thinking_token_budget
    marks = tokenizer.marks((row.literals if row else "") + " ".join(think or ()))
    if budget is not None and (think is None or think[1] not in marks):
        raise Unsupported(
            "thinking_token_budget: this model does not reason, or has no token that ends it",
            param="thinking_token_budget",
        )
    if row is None and think is None:
        return None, None
    is_open = think is not None and prompt.rstrip().endswith(think[0].rstrip())
    turn = TurnFormat(row, calls.schemas() if calls else {}, think, is_open, marks)
    is_bound = bool(answer.grammar)
    if calls is None and not is_bound and budget is None:
        return turn, None
    source = {
        "format": row.name if row else "",
        "tools": [
            {"name": one.function.name, "parameters": schema_of(one),
             "strict": bool(one.function.strict)}
            for one in (calls.tools if calls else ())
        ],
        "choice": calls.choice if calls else "auto",
        "parallel": calls.parallel if calls else False,
        "think": think and {"start": think[0], "end": think[1], "is_open": is_open,
                            "budget": budget},
        "marks": marks,
        "is_bound": is_bound,
        "answer": answer.grammar,
    }  # fmt: skip
    return turn, Wanted("turn", source, True, "tools" if calls else "response_format")
