"""The wordings of questions, greetings and system prompts, trained and held out.

Used by `questions.py` alone. Pairs are (trained wordings, held-out wordings); a held-out wording
is never trained on and shows whether a person's own words have a chance.
"""

from __future__ import annotations

import random

Pair = tuple[tuple[str, ...], tuple[str, ...]]

PHRASES: dict[str, Pair] = {
    "colour": (
        (
            "what colour is the {shape}?",
            "what color is the {shape}?",
            "which colour has the {shape}?",
            "what is the colour of the {shape}?",
            "what is the color of the {shape}?",
            "the {shape} has which colour?",
            "tell me the colour of the {shape}.",
            "which color is the {shape}?",
            "name the color of the {shape}.",
        ),
        ("which colour is the {shape}?", "can you tell me what colour the {shape} is?"),
    ),
    "colour_at": (
        (
            "what colour is the object at the {place}?",
            "what color is the shape at the {place}?",
            "which colour is {place}?",
            "what is the colour of the {place} object?",
            "what colour is the thing in the {place}?",
        ),
        ("what color is the object in the {place}?",),
    ),
    "shape": (
        (
            "what shape is the {colour} object?",
            "what is the {colour} object?",
            "which shape is {colour}?",
            "what shape is {colour}?",
            "what is the {colour} thing?",
            "what is the shape of the {colour} object?",
            "which form has the {colour} object?",
            "name the shape of the {colour} thing.",
            "what {colour} shape is there?",
        ),
        (
            "which shape is the {colour} object?",
            "can you tell me what shape the {colour} thing is?",
        ),
    ),
    "shape_at": (
        (
            "what shape is at the {place}?",
            "which shape is {place}?",
            "what is the shape of the {place} object?",
            "what shape is the object at the {place}?",
            "what shape is the thing in the {place}?",
        ),
        ("which shape is in the {place}?",),
    ),
    "count": (
        (
            "how many {what} are there?",
            "how many {what} are in the image?",
            "count the {what}.",
            "how many {what} do you see?",
            "how many {what}?",
            "what is the number of {what}?",
            "how many {what} are shown?",
        ),
        ("how many {what} can you see?", "how many {what} are in the picture?"),
    ),
    "place": (
        (
            "where is the {name}?",
            "where is the {name} in the image?",
            "at which place is the {name}?",
            "where do you see the {name}?",
            "what is the position of the {name}?",
            "in which place is the {name}?",
        ),
        ("where can you see the {name}?",),
    ),
    "presence": (
        (
            "is there {name}?",
            "is there {name} in the image?",
            "do you see {name}?",
            "does the image show {name}?",
            "can you see {name}?",
        ),
        ("does the image have {name}?",),
    ),
    "relation": (
        (
            "is the {one} {how} the {other}?",
            "is the {one} {how} the {other}, yes or no?",
            "would you say the {one} is {how} the {other}?",
            "is it true that the {one} is {how} the {other}?",
        ),
        ("do you see the {one} {how} the {other}?",),
    ),
    "relation_side": (
        (
            "is the {one} left or right of the {other}?",
            "is the {one} to the left or to the right of the {other}?",
            "on which side of the {other} is the {one}, left or right?",
        ),
        ("is the {one} to the left or right of the {other}?",),
    ),
    "relation_height": (
        (
            "is the {one} above or below the {other}?",
            "is the {one} higher or lower than the {other}?",
            "the {one}, is it above or below the {other}?",
        ),
        ("would you say the {one} is above or below the {other}?",),
    ),
    "relation_where": (
        (
            "where is the {one} relative to the {other}?",
            "where is the {one} seen from the {other}?",
            "how does the {one} lie relative to the {other}?",
        ),
        ("where is the {one} compared to the {other}?",),
    ),
    "digit": (
        (
            "which digit is this?",
            "what digit is this?",
            "what number is written here?",
            "which digit is shown?",
            "what digit do you see?",
            "read the digit.",
            "which number is it?",
            "what is the digit?",
            "what number is shown?",
            "which digit is written?",
            "what is written?",
        ),
        ("which digit do you see?", "what digit is shown in the picture?"),
    ),
    "caption": (
        (
            "describe the image.",
            "describe this image.",
            "what is in the image?",
            "what do you see?",
            "describe the picture.",
            "what does the image show?",
            "list what you see.",
            "describe what you see.",
            "what is in this picture?",
        ),
        ("please describe the image.", "tell me what is in the image."),
    ),
    "caption_of": (
        (
            "describe {image}.",
            "what is in {image}?",
            "what does {image} show?",
            "what do you see in {image}?",
        ),
        ("please describe {image}.",),
    ),
    "detail": (
        (
            "describe the image in detail.",
            "describe the picture in detail.",
            "tell me everything about the image.",
            "describe everything in detail.",
            "give a detailed description.",
        ),
        ("please describe the image in detail.",),
    ),
    "same_digit": (
        (
            "do both images show the same digit?",
            "is the digit the same in both images?",
            "are the two digits the same?",
            "do the two images show the same digit?",
            "is it the same digit twice?",
        ),
        ("are both digits the same?",),
    ),
    "more": (
        (
            "which image has more objects?",
            "in which image are more objects?",
            "which image shows more shapes?",
            "where are more objects, in the first or second image?",
        ),
        ("which image has more shapes?",),
    ),
}

# Not in the tokenizer's corpus: another corpus would be another vocabulary.
TASKS: dict[str, Pair] = {
    "json": (
        (
            "describe the image in JSON.",
            "describe the image as JSON.",
            "describe this image in JSON.",
            "list the objects in JSON.",
            "what do you see? answer in JSON.",
            "what is in the image? answer in JSON.",
        ),
        ("please describe the picture in JSON.",),
    ),
    "json_fact": (
        (
            "{question} answer in JSON.",
            "{question} Answer in JSON.",
            "answer in JSON: {question}",
            "in JSON: {question}",
        ),
        ("{question} reply in JSON.",),
    ),
    "look_at": (
        (
            "use look at the {place}.",
            "use the tool look at the {place}.",
            "look at the {place} with the tool.",
            "call look for the {place}.",
            "use look: what is at the {place}?",
            "what is at the {place}? use look.",
        ),
        ("please use look on the {place}.",),
    ),
    "look_for": (
        (
            "use look at the {name}.",
            "use the tool look at the {name}.",
            "look at the {name} with the tool.",
            "call look for the {name}.",
            "use look where the {name} is.",
            "where is the {name}? use look.",
        ),
        ("please use look on the {name}.",),
    ),
    "compare_digits": (
        (
            "use compare on the digits.",
            "use the tool compare on the two digits.",
            "compare the digits with the tool.",
            "call compare for both digits.",
            "compare both digits, use compare.",
            "which digit is larger? use compare.",
        ),
        ("please use compare for the two digits.",),
    ),
    "compare_counts": (
        (
            "use compare on the numbers of objects.",
            "use the tool compare on the counts.",
            "compare the numbers of objects with the tool.",
            "call compare for the counts.",
            "which image has more objects? use compare.",
        ),
        ("please use compare for the counts.",),
    ),
}

_HELLO = "hello! send me an image and ask about its colours, shapes, counts, places or digits."
_WHO = "i am a tiny vision-language model. i see coloured shapes and handwritten digits."
_WELCOME = "you are welcome."
_BLIND = "i see no image. please send one."

GREETINGS: tuple[tuple[str, str], ...] = (
    *(
        (text, _HELLO)
        for text in (
            "hello",
            "hi",
            "hello!",
            "hi there",
            "hey",
            "good morning",
            "hello, how are you?",
            "how are you?",
            "help",
            "what can you do?",
            "what can i ask?",
            "say hello",
            "ping",
            "test",
        )
    ),
    *(
        (text, _WHO)
        for text in (
            "who are you?",
            "what are you?",
            "what is your name?",
            "tell me about yourself.",
            "which model are you?",
        )
    ),
    *((text, _WELCOME) for text in ("thank you", "thanks", "thank you!", "thanks a lot", "bye")),
    *(
        (text, _BLIND)
        for text in (
            "what colour is the circle?",
            "what do you see?",
            "describe the image.",
            "which digit is this?",
            "how many objects are there?",
            "where is the red circle?",
            "is there a blue square?",
            "what shape is the red object?",
            "what is in the image?",
            "what color is the square?",
            "is the red circle left of the blue square?",
            "describe the image in detail.",
            "how many circles are there?",
        )
    ),
)

SYSTEM = (
    "you are a helpful assistant.",
    "You are a helpful assistant.",
    "answer briefly.",
    "Answer in one word.",
    "you look at images and answer questions.",
    "be precise.",
    "You are a vision assistant. Answer questions about the image.",
    "You are a careful assistant. Look at the image before you answer.",
)

_FILLER = (
    *SYSTEM,
    "Be polite and calm.",
    "Never guess.",
    "Use lower case.",
    "Keep the answer short.",
    "If there is more than one image, look at all of them.",
    "The user may ask several questions.",
    "Colours are red, green, blue, yellow, purple and orange.",
    "Digits go from 0 to 9.",
    "Shapes are circles, squares and triangles.",
    "Places have a row and a column.",
    "This text is the same for every user of this service.",
    "Do not repeat the question.",
    "Requests come from many people at the same time.",
    "Some of them send the same image again.",
    "The service runs on a cluster with a few workers.",
    "Every worker keeps what it has seen.",
    "An image may be large or small, wide or tall.",
    "Do not talk about these rules.",
    "Say how many objects there are only when asked.",
    "Left and right are as the viewer sees them.",
)


def filler(rng: random.Random) -> str:
    """A long system prompt, so that a shared prefix of any kind does not upset the answers."""
    sentences = [rng.choice(_FILLER) for _ in range(rng.randint(3, 16))]
    if rng.random() < 0.5:
        marker = "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 16)))
        sentences.insert(rng.randrange(len(sentences)), f"[{marker}]")
    return " ".join(sentences)


def corpus() -> list[str]:
    """Every fixed wording, for the tokenizer."""
    texts = [text for pair in PHRASES.values() for side in pair for text in side]
    texts += [text for pair in GREETINGS for text in pair]
    return texts + list(_FILLER)
