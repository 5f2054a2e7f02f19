"""Conversations that are answered in JSON or by calling a tool, beside those of `questions.py`.

What is asked for is read from the picture or from the words before; what a tool returned is told,
whatever the picture shows. A family of its own offers tools that nobody asks to use.
"""

from __future__ import annotations

import json
from typing import Any

from questions import (
    CAPTIONS,
    FAMILIES,
    SCENE_FAMILIES,
    Asker,
    Sample,
    Turn,
    as_typed,
    in_parts,
    with_article,
)
from scenes import COLOURS, COLUMNS, ROWS, SHAPES, Picture, draw_digit, draw_scene
from wording import TASKS

STRUCTURED_FAMILIES = ("json", "look", "compare", "unasked")
ALL_FAMILIES = (*FAMILIES, *STRUCTURED_FAMILIES)
PLACES = tuple(f"{row} {column}" for row in ROWS for column in COLUMNS)
FACTS = ("colour", "shape", "count", "place")  # answered by one value, in JSON, too
RESULTS = ("the same", "different", "the first is larger", "the second is larger")

_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
TOOLS: dict[str, dict[str, Any]] = {
    "look": {"place": {"enum": list(PLACES)}},
    "compare": {"first": _NUMBER, "second": _NUMBER},
    "search": {"query": _TEXT},
    "zoom": {"factor": _NUMBER},
    "read": {"page": _NUMBER, "line": _NUMBER},
    "time": {},
}


def tool(name: str) -> dict[str, Any]:
    """The tool as a chat request offers it."""
    parameters = {
        "type": "object",
        "properties": TOOLS[name],
        "required": list(TOOLS[name]),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def written(name: str, arguments: dict[str, Any]) -> str:
    """A call as the model writes it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


class StructuredAsker(Asker):
    """Asks all families."""

    def task(self, key: str, **slots: str) -> str:
        trained, held = TASKS[key]
        return self.rng.choice(held if self.unseen else trained).format(**slots)

    def pictures_for(self, family: str) -> list[Picture]:
        if family == "json" and self.rng.random() < 0.2:
            return [draw_digit(self.rng, self.held_out)]
        return super().pictures_for(family)

    def turn(self, family: str, picture: Picture) -> Turn | None:
        return self._json(picture) if family == "json" else super().turn(family, picture)

    def sample(self, family: str, earlier: tuple[str, ...] = (), long: bool = False) -> Sample:
        if family in ("look", "compare"):
            return self._calling(family, long)
        if family == "unasked":
            plain = self.rng.choice((*SCENE_FAMILIES, *CAPTIONS, "digit", "text"))
            sample = super().sample(plain, earlier, long)
            sample.family, sample.options = family, {"tools": self._offer()}
            return sample
        sample = super().sample(family, earlier, long)
        if family == "json" and self.rng.random() < 0.5:
            sample.options = {"response_format": {"type": "json_object"}}
        return sample

    def _json(self, picture: Picture) -> Turn | None:
        """The whole picture, or one fact about it."""
        if self.rng.random() < 0.5:
            key = self.rng.choice(FACTS) if picture.digit is None else "digit"
            turn = super().turn(key, picture)
            if turn is None:
                return None
            value = int(turn.answer) if key in ("count", "digit") else turn.answer
            question, found = self.task("json_fact", question=turn.question), {key: value}
        elif picture.digit is None:
            objects = [
                {"place": thing.place, "colour": thing.colour, "shape": thing.shape}
                for thing in picture.things
            ]
            question, found = self.task("json"), {"objects": objects}
        else:
            question, found = self.task("json"), {"digit": picture.digit}
        answer = json.dumps(found)
        return Turn(question, answer, answer)

    def _offer(self, *names: str) -> list[dict[str, Any]]:
        """The named tools among others."""
        others = [name for name in TOOLS if name not in names]
        number = self.rng.choice((0, 0, 1, 2) if names else (1, 2, 3))
        chosen = [*names, *self.rng.sample(others, number)]
        return [tool(name) for name in self.rng.sample(chosen, len(chosen))]

    def _calling(self, family: str, long: bool) -> Sample:
        """Ends with the call, or with the answer that follows from the tool's result."""
        sample = Sample(family)
        if family == "look" and self.rng.random() < 0.3:
            sample = super().sample(self.rng.choice(SCENE_FAMILIES), (), long)
            sample.family = family
            sample.messages.append({"role": "assistant", "content": sample.answer})
        else:
            sample.messages += self.system(long)
        begun = bool(sample.pictures)
        question, arguments = getattr(self, "_" + family)(sample)
        text = as_typed(self.rng, question)
        content = in_parts(self.rng, text, [] if begun else sample.pictures)
        sample.messages.append({"role": "user", "content": content})
        sample.options = {"tools": self._offer(family)}
        if self.rng.random() < 0.35:
            sample.answer = sample.verdict = written(family, arguments)
            return sample
        function = {"name": family, "arguments": json.dumps(arguments)}
        calls = [{"id": "call-1", "type": "function", "function": function}]
        sample.messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        result, told = self._result(family, sample)
        sample.messages.append({"role": "tool", "tool_call_id": "call-1", "content": result})
        where = f"the {arguments['place']} shows" if family == "look" else "the tool says:"
        sample.answer = sample.verdict = f"{where} {told}."
        return sample

    def _look(self, sample: Sample) -> tuple[str, dict[str, Any]]:
        """At a place that is named, or where the picture shows what is named."""
        if not sample.pictures and self.rng.random() < 0.8:
            sample.pictures = [draw_scene(self.rng)]
        things = sample.pictures[0].things if sample.pictures else ()
        unique = self.unique(things, "name")
        if unique and self.rng.random() < 0.6:
            thing = self.rng.choice(unique)
            return self.task("look_for", name=thing.name), {"place": thing.place}
        place = self.rng.choice(PLACES)
        return self.task("look_at", place=place), {"place": place}

    def _compare(self, sample: Sample) -> tuple[str, dict[str, Any]]:
        """The digits or the numbers of objects of two pictures."""
        kind = self.rng.choice(("digits", "digits", "counts"))
        sample.pictures = self.pictures_for("two_digits" if kind == "digits" else "two_scenes")
        numbers = [
            picture.digit if kind == "digits" else len(picture.things)
            for picture in sample.pictures
        ]
        arguments = dict(zip(("first", "second"), numbers, strict=True))
        return self.task(f"compare_{kind}"), arguments

    def _result(self, family: str, sample: Sample) -> tuple[Any, str]:
        """What the tool returns, now and then as a picture, and how it is told."""
        if family == "compare":
            told = self.rng.choice((*RESULTS, str(self.rng.randrange(10))))
            return told, told
        if self.rng.random() < 0.3:
            picture = draw_scene(self.rng, 1)
            sample.pictures = [*sample.pictures, picture]
            return [{"type": "image"}], with_article(picture.things[0].name)
        name = f"{self.rng.choice(list(COLOURS))} {self.rng.choice(SHAPES)}"
        told = with_article(name) if self.rng.random() < 0.85 else "nothing"
        return told, told
