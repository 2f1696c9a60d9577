"""Python's garbage collector during work whose objects live until its end."""

import gc
from contextlib import suppress

from meshwright.collector import collector_paused


def test_collections_stop_until_the_end_of_the_outer_work() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collections_go_on_after_an_error() -> None:
    with suppress(ValueError), collector_paused():
        raise ValueError
    assert gc.isenabled()


def test_survivors_are_in_the_oldest_generation_and_still_collected() -> None:
    with collector_paused():
        survivor = [object()]
    assert any(each is survivor for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0
