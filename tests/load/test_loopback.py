"""A runner asked over HTTP by another process."""

import pytest
from tests.serve.mock import MockRunner

from meshwright.errors import DeviceError
from meshwright.load.loopback import Loopback


def test_all_that_is_asked_is_answered_and_failures_are_told() -> None:
    runner = MockRunner(num_slots=4)
    loopback = Loopback(runner)
    try:
        loopback.ask(3, 5, 2)
        assert runner.num_generated == 3 * 5 * 2
        assert {len(prompt) for prompt in runner.prefilled} == {1}
        with pytest.raises(DeviceError, match=r"over HTTP: 400: .* the context holds 64"):
            loopback.ask(1, 64, 1)
    finally:
        loopback.close()
    assert loopback._client.returncode == 0
