"""Short stories in simple English, put together from parts: a corpus for small models, made on the spot.

A model of a few million parameters learns from such stories in minutes to write sentences of its own (Eldan
and Li, "TinyStories", arXiv:2305.07759). Each is about a wish, a problem, and a friend who helps.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

NUM_STORIES = 6_000
_PARTS = Path(__file__).with_name("stories.toml")
_PRONOUNS = {"boys": ("he", "his", "him"), "girls": ("she", "her", "her")}


def stories() -> Iterator[str]:
    """NUM_STORIES texts of some 600 characters, the same at each call."""
    parts = tomllib.loads(_PARTS.read_text(encoding="utf-8"))
    random = Random(0)
    return (_story(random, parts) for _ in range(NUM_STORIES))


def _story(random: Random, parts: dict[str, Any]) -> str:
    def words_of(key: str) -> str:
        return random.choice(parts[key].split())

    sex, sex_of_friend = random.choice(["boys", "girls"]), random.choice(["boys", "girls"])
    he, his, him = _PRONOUNS[sex]
    words = {
        "name": words_of(sex),
        "he": he,
        "He": he.title(),
        "his": his,
        "His": his.title(),
        "him": him,
        "look": words_of("looks"),
        "flook": words_of("looks"),
        "kind": _kind(words_of("kinds"), sex),
        "fkind": _kind(words_of("kinds"), sex_of_friend),
        "sky": words_of("skies"),
        "time": words_of("times"),
        "home": random.choice(parts["homes"]),
        "family": random.choice(parts["family"]),
        "food": random.choice(parts["foods"]),
        "feeling": random.choice(parts["feelings"]),
        "Place": random.choice(parts["places"]),
        "joy": random.choice(parts["joys"]),
    }
    words |= {key: text.format(**words) for key, text in random.choice(parts["plot"]).items()}
    sentences = [
        random.choice(parts[key]).format(**words)
        for key in ("openings", "wishes", "problems", "meetings", "helps", "ends")
    ]
    if random.random() < 0.5:
        sentences.append(random.choice(parts["morals"]))
    paragraphs = sentences[:3], sentences[3:5], sentences[5:]
    return "".join(" ".join(paragraph) + "\n" for paragraph in paragraphs)


def _kind(written: str, sex: str) -> str:
    """`boy/girl` is a boy or a girl; other kinds are written once."""
    return written.split("/")[sex == "girls"] if "/" in written else written
