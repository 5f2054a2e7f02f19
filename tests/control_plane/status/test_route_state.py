"""RouteReady waits for what every gateway says of the route as it is now."""

from __future__ import annotations

import pytest

from foveal_operator.kube.types import Obj
from foveal_operator.status.conditions import route_state


def route(*parents: Obj, refs: tuple[Obj, ...] = ({"name": "edge"}, {"name": "inner"})) -> Obj:
    metadata = {"name": "tiny", "namespace": "default", "generation": 3}
    return {
        "metadata": metadata, "spec": {"parentRefs": refs}, "status": {"parents": list(parents)}
    }  # fmt: skip


def answer(gateway: str, status: str = "True", generation: int = 3, **ref: str) -> Obj:
    said = {"type": "Accepted", "status": status, "message": "no listener"}
    said |= {"observedGeneration": generation} if generation else {}  # type: ignore[dict-item]
    return {"parentRef": {"name": gateway, **ref}, "conditions": [said]}


@pytest.mark.parametrize(
    ("parents", "expected"),
    [
        ([answer("edge"), answer("inner")], (True, "")),
        ([answer("edge"), answer("inner", "False")], (False, "gateway inner: no listener")),
        # Nobody is at home at the second one: the answer of the first was taken for both.
        ([answer("edge")], (False, "no answer yet to the route as it is now: gateway inner")),
        ([], (False, "no answer yet to the route as it is now: gateway edge, inner")),
        # After an edit the answer to the route as it was: Ready told of the new generation.
        (
            [answer("edge"), answer("inner", generation=2)],
            (False, "no answer yet to the route as it is now: gateway inner"),
        ),
        (
            [answer("edge"), answer("inner", "False", generation=2)],
            (False, "no answer yet to the route as it is now: gateway inner"),
        ),
        # A controller that does not say of which generation it speaks is believed.
        ([answer("edge"), answer("inner", generation=0)], (True, "")),
        # One that is not asked for any more, and one that only has the name.
        ([answer("edge"), answer("inner"), answer("old", "False")], (True, "")),
        (
            [answer("edge"), answer("inner", namespace="infra")],
            (False, "no answer yet to the route as it is now: gateway inner"),
        ),
        ([{"parentRef": {"name": "edge"}}, answer("inner")],
         (False, "no answer yet to the route as it is now: gateway edge")),
    ],
)  # fmt: skip
def test_a_route_waits_for_the_present_answer_of_every_gateway(
    parents: list[Obj], expected: tuple[bool, str]
) -> None:
    assert route_state(None, False) == (None, "")
    assert route_state(None, True)[0] is False
    assert route_state(route(*parents), True) == expected


def test_listeners_of_a_gateway_answer_for_themselves() -> None:
    refs = ({"name": "edge", "sectionName": "a"}, {"name": "edge", "sectionName": "b"})
    one, both = [answer("edge", sectionName=name) for name in "a"], "ab"
    assert route_state(route(*one, refs=refs), True)[0] is False
    answers = [answer("edge", sectionName=name, namespace="default") for name in both]
    assert route_state(route(*answers, refs=refs), True) == (True, "")
    assert route_state(route(*answers, refs=({"name": "edge"},)), True) == (True, "")
