"""What a night runs of the tests that are sampled."""

from types import SimpleNamespace
from typing import Any

from tests.sampling import of_tonight


def _items(name: str, number: int, **marks: tuple[int, ...]) -> list[Any]:
    found = {key: SimpleNamespace(args=args) for key, args in marks.items()}
    return [SimpleNamespace(nodeid=f"{name}[{n}]", get_closest_marker=found.get) for n in range(number)]


def _names(items: list[Any]) -> list[str]:
    return [item.nodeid for item in items]


def test_one_of_so_many_slow_cases_runs_and_all_others_do() -> None:
    slow = _items("file.py::long", 10, slow=(), sampled=(4,))
    alone = _items("other.py::alone", 1, slow=(), sampled=(4,))
    others = [*_items("file.py::quick", 3, sampled=(4,)), *_items("file.py::whole", 5, slow=())]
    run, left = of_tonight([*slow, *alone, *others], "20261126")
    assert len(left) == 7 and set(_names(left)) < set(_names(slow))
    assert _names(run)[-9:] == _names([*alone, *others])
    assert sorted(_names([*run, *left])) == sorted(_names([*slow, *alone, *others]))


def test_a_seed_draws_the_same_again_and_seeds_draw_every_case() -> None:
    items = _items("file.py::long", 40, slow=(), sampled=(4,))
    assert _names(of_tonight(items, "1")[0]) == _names(of_tonight(items, "1")[0])
    nights = [frozenset(_names(of_tonight(items, str(seed))[0])) for seed in range(40)]
    assert len(set(nights)) > 30 and len(frozenset.union(*nights)) == 40
