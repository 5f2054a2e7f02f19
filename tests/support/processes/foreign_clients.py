"""A run of one of other projects' clients against a server; its answers as JSON on stdout.

Started by tests/processes/test_foreign_clients.py in the environment of `make clients`. Reads JSON
of {client, url, messages, text, max_tokens}; `messages` have an image, `text` has none. Clients ask
for the whole answer, for a stream, for an answer that follows a schema, and for a call of a tool
whose result they send back.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny-vlm"
BOUND_TOKENS = 900
"""Within them the model, not trained for it, ends a bound answer."""
ASK = "What is red?"
RESULT = "A red circle."


LONG = [{"role": "user", "content": "x " * 20_000}]


class Shape(BaseModel):
    """The shape that is seen."""

    model_config = ConfigDict(extra="forbid")

    shape: Literal["circle", "square"]
    count: int = Field(ge=0, le=9)


class Anything(BaseModel):
    """What a JSON mode without a schema may give."""

    model_config = ConfigDict(extra="allow")


def look(shape: Literal["circle", "square"], count: Literal[1, 2, 3]) -> str:
    """Looks for shapes in the image."""
    return RESULT


TOOL = {
    "type": "function",
    "function": {
        "name": "look", "description": "Looks for shapes in the image.",
        "parameters": {
            "type": "object", "required": ["shape", "count"], "additionalProperties": False,
            "properties": {
                "shape": {"enum": ["circle", "square"]}, "count": {"enum": [1, 2, 3]},
            },
        },
    },
}  # fmt: skip


def with_litellm(task: dict[str, Any]) -> dict[str, Any]:
    common = {
        "model": f"openai/{MODEL}", "api_base": task["url"] + "/v1", "api_key": "none",
        "messages": task["messages"], "temperature": 0, "max_tokens": task["max_tokens"],
    }  # fmt: skip
    return _litellm_answers(common, task)


def _litellm_answers(common: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
    import litellm

    whole = litellm.completion(**common)
    chunks = litellm.completion(**common, stream=True)
    longer = {**common, "max_tokens": BOUND_TOKENS}
    bound = litellm.completion(**longer, response_format=Shape)
    text = litellm.completion(**{**common, "messages": task["text"]})
    return {
        "whole": whole.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "text": text.choices[0].message.content,
        "bound": json.loads(bound.choices[0].message.content),
        "tools": _litellm_tools(longer),
        "too-long": _raised_by(litellm.completion, **{**common, "messages": LONG}),
    }


def _raised_by(ask: Any, **options: Any) -> str:
    """The error's class: what agents decide by to shorten a conversation."""
    try:
        ask(**options)
    except Exception as error:
        return type(error).__name__
    return ""


def _litellm_tools(common: dict[str, Any]) -> dict[str, Any]:
    import litellm

    tools = {"tools": [TOOL], "parallel_tool_calls": False}
    asked = litellm.completion(**common, **tools, tool_choice="required")
    message = asked.choices[0].message
    [call] = message.tool_calls
    said = {"role": "tool", "tool_call_id": call.id, "content": RESULT}
    history = [*common["messages"], message.model_dump(), said]
    after = litellm.completion(**{**common, "messages": history}, **tools, tool_choice="none")
    return {
        "name": call.function.name, "arguments": json.loads(call.function.arguments),
        "reason": asked.choices[0].finish_reason, "after": after.choices[0].message.content,
    }  # fmt: skip


def with_litellm_messages(task: dict[str, Any]) -> dict[str, Any]:
    """Its path to Anthropic's API."""
    common = {
        "model": f"anthropic/{MODEL}", "api_base": task["url"], "api_key": "none",
        "messages": task["messages"], "temperature": 0, "max_tokens": task["max_tokens"],
    }  # fmt: skip
    return _litellm_answers(common, task)


def with_langchain(task: dict[str, Any]) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL, base_url=task["url"] + "/v1", api_key="none", temperature=0,
        max_tokens=task["max_tokens"], max_retries=0,
    )  # fmt: skip
    longer = model.model_copy(update={"max_tokens": BOUND_TOKENS})
    bound = longer.with_structured_output(Shape).invoke(task["messages"])
    called = longer.with_structured_output(Shape, method="function_calling")
    responses = ChatOpenAI(
        model=MODEL, base_url=task["url"] + "/v1", api_key="none", temperature=0, max_retries=0,
        use_responses_api=True,
    )  # fmt: skip
    return {
        "whole": model.invoke(task["messages"]).content,
        "stream": "".join(chunk.content for chunk in model.stream(task["messages"])),
        "text": model.invoke(task["text"]).content,
        "bound": bound.model_dump(),
        "bound-by-call": called.invoke(task["messages"]).model_dump(),
        "responses": responses.invoke(task["messages"]).text,
        "tools": _langchain_tools(longer, task["messages"]),
        "responses-tools": _langchain_tools(
            responses.model_copy(update={"max_tokens": BOUND_TOKENS}), task["messages"]
        ),
    }


def _langchain_tools(model: Any, messages: list[Any]) -> dict[str, Any]:
    from langchain_core.messages import ToolMessage

    asked = model.bind_tools([TOOL], tool_choice="required", parallel_tool_calls=False).invoke(
        messages
    )
    [call] = asked.tool_calls
    said = ToolMessage(RESULT, tool_call_id=call["id"])
    told = model.bind_tools([TOOL], tool_choice="none").invoke([*messages, asked, said])
    return {"name": call["name"], "arguments": call["args"], "after": told.text}


def with_instructor(task: dict[str, Any]) -> dict[str, Any]:
    import instructor
    import openai

    def ask(mode: Any, model: Any, create: str = "create", **more: Any) -> Any:
        client = instructor.from_openai(
            openai.OpenAI(base_url=task["url"] + "/v1", api_key="none", max_retries=0), mode=mode
        )
        options = {"messages": task["messages"], "temperature": 0, **more}
        return getattr(client.chat.completions, create)(
            model=MODEL, response_model=model, max_retries=0, max_tokens=BOUND_TOKENS, **options
        )

    modes = instructor.Mode
    # Left to itself the model calls nothing, and the mode says `auto`.
    several = ask(
        modes.PARALLEL_TOOLS, Iterable[Shape], extra_body={
            "tool_choice": "required", "parallel_tool_calls": False,
        },
    )  # fmt: skip
    return {
        "bound": ask(modes.JSON_SCHEMA, Shape).model_dump(),
        "bound-by-call": ask(modes.TOOLS, Shape).model_dump(),
        "bound-in-parallel": next(one.model_dump() for one in several),
        "bound-text": ask(modes.JSON_SCHEMA, Shape, messages=task["text"]).model_dump(),
        "bound-stream": list(ask(modes.JSON_SCHEMA, Shape, "create_partial"))[-1].model_dump(),
        "object": ask(modes.JSON, Anything).model_dump(),
    }


def with_pydantic_ai(task: dict[str, Any]) -> dict[str, Any]:
    from pydantic_ai import Agent, BinaryContent, NativeOutput, ToolOutput
    from pydantic_ai.capabilities import PrepareOutputTools, PrepareTools
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=task["url"] + "/v1", api_key="none")
    settings = {"temperature": 0, "max_tokens": BOUND_TOKENS, "parallel_tool_calls": False}
    kinds = (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel))

    async def first(context: Any, tools: list[Any]) -> list[Any]:
        return tools if context.run_step == 1 else []

    async def later(context: Any, tools: list[Any]) -> list[Any]:
        return tools if context.run_step > 1 else []

    async def round_trip(kind: Any) -> dict[str, Any]:
        """It looks first; then its output is a call, too."""
        called = []

        def look(shape: Literal["circle", "square"], count: Literal[1, 2, 3]) -> str:
            """Looks for shapes in the image."""
            called.append({"shape": shape, "count": count})
            return RESULT

        agent = Agent(
            kind(MODEL, provider=provider), tools=[look], output_type=ToolOutput(Shape),
            model_settings=settings, capabilities=[PrepareTools(first), PrepareOutputTools(later)],
        )  # fmt: skip
        end = await agent.run(ASK)
        return {"name": "look", "arguments": called[0], "bound": end.output.model_dump()}

    def prompt(message: dict[str, Any]) -> Any:
        if isinstance(message["content"], str):
            return message["content"]
        return [
            part["text"] if part["type"] == "text"
            else BinaryContent(_image_of(part), media_type="image/png")
            for part in message["content"]
        ]  # fmt: skip

    async def ask() -> dict[str, Any]:
        short = {**settings, "max_tokens": task["max_tokens"]}
        [image], [text] = task["messages"], task["text"]
        found: dict[str, Any] = {}
        for name, kind in kinds:
            agent = Agent(kind(MODEL, provider=provider), model_settings=short)
            found[name] = (await agent.run(prompt(image))).output
            found["text"] = (await agent.run(prompt(text))).output
            async with agent.run_stream(prompt(image)) as answer:
                found[name + "-stream"] = await answer.get_output()
        bound = Agent(
            OpenAIChatModel(MODEL, provider=provider),
            output_type=NativeOutput(Shape), model_settings=settings,
        )  # fmt: skip
        chat, responses = [await round_trip(kind) for _, kind in kinds]
        return {
            "whole": found["chat"],
            "responses": found["responses"],
            "stream": found["chat-stream"],
            "responses-stream": found["responses-stream"],
            "text": found["text"],
            "bound": (await bound.run(ASK)).output.model_dump(),
            "bound-by-call": chat.pop("bound"),
            "responses-bound": responses.pop("bound"),
            "tools": chat | {"after": RESULT},
            "responses-tools": responses | {"after": RESULT},
        }

    return asyncio.run(ask())


def _image_of(part: dict[str, Any]) -> bytes:
    return base64.b64decode(part["image_url"]["url"].partition(",")[2])


def with_llama_index(task: dict[str, Any]) -> dict[str, Any]:
    from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def model(max_tokens: int) -> Any:
        return OpenAILike(
            model=MODEL, api_base=task["url"] + "/v1", api_key="none", temperature=0, max_retries=0,
            max_tokens=max_tokens, is_chat_model=True, is_function_calling_model=True,
        )  # fmt: skip

    def block(part: dict[str, Any]) -> Any:
        if part["type"] == "text":
            return TextBlock(text=part["text"])
        return ImageBlock(image=_image_of(part), image_mimetype="image/png")

    history, text = (
        [
            ChatMessage(role=one["role"], blocks=[block(part) for part in one["content"]])
            if isinstance(one["content"], list)
            else ChatMessage(role=one["role"], content=one["content"])
            for one in task[name]
        ]
        for name in ("messages", "text")
    )
    plain, longer = model(task["max_tokens"]), model(BOUND_TOKENS)
    tool = FunctionTool.from_defaults(look, fn_schema=Shape)
    asked = longer.chat_with_tools([tool], chat_history=history, tool_required=True)
    [call] = longer.get_tool_calls_from_response(asked)
    said = ChatMessage(
        role="tool", content=tool(**call.tool_kwargs).content,
        additional_kwargs={"tool_call_id": call.tool_id},
    )  # fmt: skip
    after = longer.chat([*history, asked.message, said])
    return {
        "whole": plain.chat(history).message.content,
        "stream": "".join(chunk.delta or "" for chunk in plain.stream_chat(history)),
        "text": plain.chat(text).message.content,
        "bound-by-call": longer.as_structured_llm(Shape).chat(history).raw.model_dump(),
        "tools": {
            "name": call.tool_name, "arguments": call.tool_kwargs, "after": after.message.content
        },
    }  # fmt: skip


def with_lm_eval(task: dict[str, Any]) -> dict[str, Any]:
    """Its harness on two small tasks of ours: generated texts by chat, choices scored by logprobs
    of completions."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [{"question": f"What is {name}?", "answer": name} for name in ("red", "blue", "green")]
    common = "dataset_path: json\ntest_split: test\nunsafe_code: false\n"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        Path(folder, "said.yaml").write_text(
            f"task: foveal_said\n{common}{files}output_type: generate_until\n"
            'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
            "generation_kwargs:\n  max_gen_toks: 16\n  until: ['\\n\\n']\n"
            "metric_list:\n  - metric: exact_match\n"
        )
        Path(folder, "chosen.yaml").write_text(
            f"task: foveal_chosen\n{common}{files}output_type: multiple_choice\n"
            'doc_to_text: "{{question}}"\ndoc_to_target: "{{answer}}"\n'
            'doc_to_choice: ["red", "blue", "green"]\nmetric_list:\n  - metric: acc\n'
        )
        manager = TaskManager(include_path=folder, include_defaults=False)

        def run(model: str, path: str, name: str, **more: Any) -> Any:
            arguments = {"model": MODEL, "base_url": task["url"] + path, "max_retries": 1, **more}
            return lm_eval.simple_evaluate(
                model=model, model_args=arguments, tasks=[name], task_manager=manager,
                apply_chat_template=model == "local-chat-completions", log_samples=True,
                bootstrap_iters=0,
            )  # fmt: skip

        said = run("local-chat-completions", "/v1/chat/completions", "foveal_said")
        chosen = run(
            "local-completions", "/v1/completions", "foveal_chosen", tokenizer_backend="remote"
        )
    answers = [sample["resps"][0][0] for sample in said["samples"]["foveal_said"]]
    scores = [
        score[0] if isinstance(score[0], float) else score[0][0]
        for sample in chosen["samples"]["foveal_chosen"] for score in sample["resps"]
    ]  # fmt: skip
    return {"said": answers, "scores": scores}


CLIENTS = {
    "litellm": with_litellm,
    "litellm-messages": with_litellm_messages,
    "langchain-openai": with_langchain,
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
    "llama-index": with_llama_index,
    "lm-eval": with_lm_eval,
}

if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    print(json.dumps(CLIENTS[task["client"]](task)))
