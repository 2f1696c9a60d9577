"""Which server a request goes to: where its beginning is known, unless others have far less to do."""

import json
import time

import pytest

from meshwright.serve.replicas.routes import Beginning, Routing, beginning_of, prompt_in

FIRST, SECOND = ({"prompt": letter * 1000} for letter in "ab")


@pytest.fixture
def routes() -> Routing:
    return Routing(most_ahead=2)


def beginning(body: object) -> Beginning:
    return beginning_of(prompt_in(json.dumps(body).encode()))


def sent(routes: Routing, name: str, body: object) -> str:
    """The server that a request goes to, and stays at."""
    routes.open(name)
    chosen = routes.ranked(beginning(body), ["x", "y"])[0]
    routes.send(name, beginning(body), chosen)
    return chosen


def test_prompts_that_begin_alike_go_to_one_server(routes):
    assert [sent(routes, "1", FIRST), sent(routes, "2", SECOND)] == ["x", "y"]
    for name in ("1", "2"):
        routes.end(name)
    longer = {"prompt": FIRST["prompt"] + "and more" * 100}
    assert [sent(routes, "3", SECOND), sent(routes, "4", longer)] == ["y", "x"]


def test_a_chat_goes_where_its_earlier_turns_went(routes):
    first = [{"role": "user", "content": "question " * 50}]
    second = [*first, {"role": "assistant", "content": "answer"}, {"role": "user", "content": "again"}]
    sent(routes, "1", FIRST)
    assert sent(routes, "2", {"messages": first}) == "y"
    routes.end("1")
    assert sent(routes, "3", {"messages": second}) == "y"


def test_a_server_too_far_ahead_of_the_idlest_is_passed_over(routes):
    assert [sent(routes, str(i), FIRST) for i in range(4)] == ["x", "x", "x", "y"]
    routes.end("0")
    assert sent(routes, "5", FIRST) == "y"  # which knows it by now


def test_without_a_known_beginning_the_idlest_is_asked(routes):
    assert [sent(routes, str(i), {"tokens": [i]}) for i in range(4)] == ["x", "y", "x", "y"]


def test_a_request_whose_client_left_before_it_was_sent_counts_nowhere(routes):
    routes.open("1")
    routes.end("1")
    routes.send("1", (), "x")
    assert [sent(routes, str(i), None) for i in (2, 3)] == ["x", "y"]


def test_what_a_server_knew_is_forgotten_with_it(routes):
    sent(routes, "1", FIRST)
    routes.keep(["y"])
    assert routes.servers == ["y"]
    routes.keep(["x", "y"])
    routes.open("2")
    assert routes.ranked(beginning(FIRST), ["y", "x"]) == ["y", "x"]


def test_a_prompt_after_other_fields_is_known_by_it(routes):
    sent(routes, "1", {"model": "m", "temperature": 0.1} | SECOND)
    sent(routes, "2", {"model": "m"} | FIRST)
    for name in ("1", "2"):
        routes.end(name)
    assert sent(routes, "3", {"temperature": 0.2} | FIRST | {"max_tokens": 9}) == "y"


@pytest.mark.parametrize(
    "body", [b"[" * 16_000_000, b'{"a":' * 3_000_000, b'{"prompt": [' + b"{}," * 5_000_000]
)
def test_a_body_of_many_objects_does_not_delay_others(body: bytes):
    began = time.process_time()
    beginning_of(prompt_in(body))
    assert time.process_time() - began < 0.05


@pytest.mark.parametrize("body", [None, [], {}, {"prompt": "short"}, {"prompt": 7}, {"messages": "x"}])
def test_a_body_without_a_long_prompt_has_no_beginning(body):
    assert beginning(body) == ()


def test_token_ids_are_prompts_too():
    assert len(beginning({"prompt": list(range(1000))})) > 10
