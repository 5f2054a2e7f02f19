"""A run of one of other projects' clients against a server; its answers as JSON on stdout.

Started by tests/processes/test_foreign_clients.py in the environment of `make clients`. Reads JSON
of {client, url, messages, max_tokens}. Clients ask for the whole answer, for a stream, and for an
answer that follows a schema.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MODEL = "tiny-vlm"
BOUND_TOKENS = 900
"""Within them the model, not trained for it, ends a bound answer."""


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid")

    shape: Literal["circle", "square"]
    count: int = Field(ge=0, le=9)


def with_litellm(task: dict[str, Any]) -> dict[str, Any]:
    import litellm

    common = {
        "model": f"openai/{MODEL}", "api_base": task["url"] + "/v1", "api_key": "none",
        "messages": task["messages"], "temperature": 0, "max_tokens": task["max_tokens"],
    }  # fmt: skip
    whole = litellm.completion(**common)
    chunks = litellm.completion(**common, stream=True)
    bound = litellm.completion(**{**common, "max_tokens": BOUND_TOKENS}, response_format=Shape)
    return {
        "whole": whole.choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "bound": json.loads(bound.choices[0].message.content),
    }


def with_litellm_messages(task: dict[str, Any]) -> dict[str, Any]:
    """Its path to Anthropic's API."""
    import litellm

    text = {"role": "user", "content": "What is red?"}
    answer = litellm.completion(
        model=f"anthropic/{MODEL}", api_base=task["url"], api_key="none", messages=[text],
        temperature=0, max_tokens=task["max_tokens"],
    )  # fmt: skip
    plain = litellm.completion(
        model=f"openai/{MODEL}", api_base=task["url"] + "/v1", api_key="none", messages=[text],
        temperature=0, max_tokens=task["max_tokens"],
    )  # fmt: skip
    return {"same": [answer.choices[0].message.content, plain.choices[0].message.content]}


def with_langchain(task: dict[str, Any]) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL, base_url=task["url"] + "/v1", api_key="none", temperature=0,
        max_tokens=task["max_tokens"], max_retries=0,
    )  # fmt: skip
    longer = model.model_copy(update={"max_tokens": BOUND_TOKENS})
    bound = longer.with_structured_output(Shape).invoke(task["messages"])
    responses = ChatOpenAI(
        model=MODEL, base_url=task["url"] + "/v1", api_key="none", temperature=0, max_retries=0,
        use_responses_api=True,
    )  # fmt: skip
    return {
        "whole": model.invoke(task["messages"]).content,
        "stream": "".join(chunk.content for chunk in model.stream(task["messages"])),
        "bound": bound.model_dump(),
        "responses": responses.invoke(task["messages"]).text,
    }


def with_instructor(task: dict[str, Any]) -> dict[str, Any]:
    import instructor
    import openai

    client = instructor.from_openai(
        openai.OpenAI(base_url=task["url"] + "/v1", api_key="none", max_retries=0),
        mode=instructor.Mode.JSON_SCHEMA,
    )
    bound = client.chat.completions.create(
        model=MODEL, response_model=Shape, messages=task["messages"], temperature=0, max_retries=0,
        max_tokens=BOUND_TOKENS,
    )  # fmt: skip
    return {"bound": bound.model_dump()}


def with_pydantic_ai(task: dict[str, Any]) -> dict[str, Any]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=task["url"] + "/v1", api_key="none")
    settings = {"temperature": 0, "max_tokens": BOUND_TOKENS}

    async def ask() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, kind in (("chat", OpenAIChatModel), ("responses", OpenAIResponsesModel)):
            agent = Agent(kind(MODEL, provider=provider), model_settings=settings)
            found[name] = (await agent.run("What is red?")).output
        bound = Agent(
            OpenAIChatModel(MODEL, provider=provider),
            output_type=NativeOutput(Shape), model_settings=settings,
        )  # fmt: skip
        found["bound"] = (await bound.run("What is red?")).output.model_dump()
        return {"same": [found["chat"], found["responses"]], "bound": found["bound"]}

    return asyncio.run(ask())


CLIENTS = {
    "litellm": with_litellm,
    "litellm-messages": with_litellm_messages,
    "langchain-openai": with_langchain,
    "instructor": with_instructor,
    "pydantic-ai": with_pydantic_ai,
}

if __name__ == "__main__":
    task = json.loads(sys.stdin.read())
    print(json.dumps(CLIENTS[task["client"]](task)))
