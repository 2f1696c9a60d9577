"""Log-probabilities, echo, forms, tools, responses, tokens: what the API offers beyond plain text."""

import asyncio
import json

import pytest
from tests.serve.http.client import MODEL, ask, chat, client, complete, events, post
from tests.serve.mock import EOS, MockRunner, byte_tokenizer, count_up, says

from meshwright.models.chat import ChatTemplate
from meshwright.serve.engine.engine import Engine
from meshwright.serve.http.app import create_app
from meshwright.serve.text.tokenizer import Tokenizer

TOKENIZER = byte_tokenizer()
TOOL_TEMPLATE = "{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>"


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text))


def test_logprobs_of_a_completion():
    [choice] = complete(MockRunner(says("né")), temperature=0, logprobs=2)["choices"]
    told = choice["logprobs"]
    assert told["tokens"] == ["n", "\ufffd", "\ufffd", "<eos>"]  # the bytes of é, each alone
    assert told["text_offset"] == [0, 1, 1, 2]
    assert all(-0.01 < logprob <= 0 for logprob in told["token_logprobs"])
    assert [len(top) for top in told["top_logprobs"]] == [2] * 4
    assert told["top_logprobs"][0]["n"] == told["token_logprobs"][0]


def test_logprobs_of_zero_tell_the_token_alone_and_ids_where_asked():
    body = complete(MockRunner(says("a")), temperature=0, logprobs=0, return_tokens_as_token_ids=True)
    told = body["choices"][0]["logprobs"]
    assert told["tokens"] == [f"token_id:{ids('a')[0]}", f"token_id:{EOS}"]
    assert [list(top) for top in told["top_logprobs"]] == [[name] for name in told["tokens"]]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["abd", ids("abd")])
def test_echo_with_logprobs_scores_the_prompt(prompt, stream):
    """As lm-evaluation-harness asks: it reads all tokens but the last, which was generated."""
    body = {"model": MODEL, "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    response = post(MockRunner(count_up), "/v1/completions", body | {"stream": stream})
    chunks = events(response.text)[:-1] if stream else [response.json()]
    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [token for part in told for token in part["tokens"]]
    logprobs = [logprob for part in told for logprob in part["token_logprobs"]]
    assert tokens[:3] == ["a", "b", "d"] and len(tokens) == 4
    assert [offset for part in told for offset in part["text_offset"]] == [0, 1, 2, 3]
    assert logprobs[0] is None and logprobs[1] > -0.01 and logprobs[2] < -19  # d does not count up from b
    top = [entry for part in told for entry in part["top_logprobs"]]
    assert top[0] is None and max(top[1], key=top[1].get) == "b" and max(top[2], key=top[2].get) == "c"


def test_echo_without_an_answer():
    body = complete(MockRunner(count_up), prompt="ab", echo=True, logprobs=0, max_tokens=0)
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "length")
    assert choice["logprobs"]["tokens"] == ["a", "b"]


def test_a_stop_string_takes_its_tokens_along():
    [choice] = complete(MockRunner(says("ab!cd")), temperature=0, stop="!", logprobs=0)["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["a", "b"])
    kept = complete(MockRunner(says("ab!cd")), temperature=0, stop="!", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "ab!"


def test_logprobs_of_a_chat():
    [choice] = chat(MockRunner(says("é")), temperature=0, logprobs=True, top_logprobs=1)["choices"]
    content = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xC3], [0xA9], [*b"<eos>"]]
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [
        entry["logprob"] for entry in content
    ]
    assert chat(MockRunner(says("é")), temperature=0)["choices"][0]["logprobs"] is None


def test_best_of_gives_the_likeliest_answers():
    body = complete(MockRunner(says("abcd"), spread=6.0), n=1, best_of=8, seed=3, max_tokens=4, logprobs=0)
    every = complete(MockRunner(says("abcd"), spread=6.0, num_slots=8), n=8, seed=3, max_tokens=4, logprobs=0)
    means = [
        sum(logprobs) / len(logprobs)
        for logprobs in (c["logprobs"]["token_logprobs"] for c in every["choices"])
    ]
    assert len(set(means)) > 1
    assert body["choices"][0]["text"] == every["choices"][means.index(max(means))]["text"]
    assert len(body["choices"]) == 1 and body["choices"][0]["index"] == 0


def test_sampling_fields_reach_the_sampler():
    [z] = ids("z")
    assert (
        complete(MockRunner(says("ab")), temperature=0, max_tokens=2, logit_bias={str(z): 100})["choices"][0][
            "text"
        ]
        == "zz"
    )
    allowed = complete(MockRunner(says("ab")), temperature=0, max_tokens=2, allowed_token_ids=[z])
    assert allowed["choices"][0]["text"] == "zz"
    stopped = complete(MockRunner(says("abz")), temperature=0, stop_token_ids=ids("b"))
    assert (stopped["choices"][0]["text"], stopped["choices"][0]["finish_reason"]) == ("a", "stop")
    shown = complete(
        MockRunner(says("a")), temperature=0, ignore_eos=True, max_tokens=3, skip_special_tokens=False
    )
    assert shown["choices"][0]["text"] == "a<eos><eos>"
    runner = MockRunner(says("a"))
    complete(runner, prompt="abcdef", truncate_prompt_tokens=2, max_tokens=1)
    assert runner.prefilled[-1] == ids("ef")


def test_the_usage_so_far_comes_with_each_chunk():
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": MODEL, "prompt": "x", "stream": True, "stream_options": options, "temperature": 0}
    *chunks, _ = events(post(MockRunner(says("ab")), "/v1/completions", body).text)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"enum": [7]}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, None),
        ({"guided_json": json.dumps(SCHEMA)}, None),
        ({"structured_outputs": {"regex": "(xy){2}"}}, "xyxy"),
        ({"guided_choice": ["one and only"]}, "one and only"),
    ],
)
def test_an_answer_of_a_given_form(fields, expected):
    pytest.importorskip("llguidance")
    [choice] = chat(MockRunner(says("hello"), context=200), temperature=0, max_tokens=60, **fields)["choices"]
    text = choice["message"]["content"]
    assert text == expected if expected else json.loads(text) == {"n": 7}
    assert choice["finish_reason"] == "stop"


def with_tools(runner: MockRunner, **fields) -> list:
    """The answer of a server whose template knows tools: one body, or the chunks."""
    tokenizer = Tokenizer(TOKENIZER.tokenizer, frozenset([EOS]), EOS, ChatTemplate(TOOL_TEMPLATE))
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools, "temperature": 0}

    async def main():
        import httpx

        with Engine(runner) as engine:
            transport = httpx.ASGITransport(create_app(engine, tokenizer, MODEL))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.post("/v1/chat/completions", json=body | fields)

    response = asyncio.run(main())
    assert response.status_code == 200, response.text
    return events(response.text)[:-1] if fields.get("stream") else [response.json()]


CALLING = 'Well.<tool_call>{"name": "f", "arguments": {"n": 7}}</tool_call>'


def test_calls_of_tools_are_parsed():
    runner = MockRunner(says(CALLING), context=400)
    [body] = with_tools(runner)
    [choice] = body["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Well.")
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"n": 7}'})
    assert '"name": "f"' in TOKENIZER.decode(runner.prefilled[-1])


def test_calls_of_tools_are_streamed_whole():
    chunks = with_tools(MockRunner(says(CALLING), context=400), stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well."
    [calls] = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert (calls[0]["index"], calls[0]["function"]["name"]) == (0, "f")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_required_call_is_made_whatever_the_model_would_say():
    pytest.importorskip("llguidance")
    [body] = with_tools(MockRunner(says("no"), context=400), tool_choice="required", max_tokens=100)
    [call] = body["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["n"] == 7


def test_a_tool_s_answer_goes_back_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    runner = MockRunner(says("ok"), context=400)
    with_tools(runner, messages=messages)
    assert TOKENIZER.decode(runner.prefilled[-1]).endswith("hi42<tool_call>")


def test_a_response_whole_and_streamed():
    body = {"model": MODEL, "input": "hi", "instructions": "Be brief.", "temperature": 0}
    whole = post(MockRunner(says("hello")), "/v1/responses", body).json()
    assert (whole["object"], whole["status"]) == ("response", "completed")
    assert whole["output"][0]["content"][0]["text"] == "hello"
    assert whole["usage"]["output_tokens"] == 6
    text = post(
        MockRunner(says("hello")), "/v1/responses", body | {"stream": True, "max_output_tokens": 3}
    ).text
    lines = [line for line in text.splitlines() if line]
    told = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [f"event: {event['type']}" for event in told] == lines[::2]
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert "".join(event["delta"] for event in told if event["type"].endswith("text.delta")) == "hel"
    assert told[-1]["type"] == "response.incomplete"
    assert told[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_tokens_and_back():
    async def question(http):
        there = await http.post("/tokenize", json={"prompt": "né", "return_token_strs": True})
        said = await http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
        back = await http.post("/detokenize", json={"tokens": there.json()["tokens"]})
        return there.json(), said.json(), back.json()

    there, said, back = ask(MockRunner(), question)
    assert there == {
        "tokens": ids("né"),
        "count": 3,
        "max_model_len": 64,
        "token_strs": ["n", "\ufffd", "\ufffd"],
    }
    assert said["count"] == len("user: hi\n\nassistant:")
    assert back == {"prompt": "né"}


def test_the_end_of_a_long_prompt_is_kept():
    for truncation, num_kept in ((20, 20), (-1, 62)):
        runner = MockRunner(says("ok"))
        body = complete(
            runner, prompt="word " * 12_000 + "end", truncate_prompt_tokens=truncation, max_tokens=2
        )
        assert body["usage"]["prompt_tokens"] == num_kept == len(runner.prefilled[-1])
        assert TOKENIZER.decode(runner.prefilled[-1]).endswith("word end")
    runner, said = MockRunner(says("ok")), [{"role": "user", "content": "x" * 1_000_000}]
    assert chat(runner, messages=said, truncate_prompt_tokens=9)["usage"]["prompt_tokens"] == 9
    refused = post(
        MockRunner(), "/v1/completions", {"model": MODEL, "prompt": "x", "truncate_prompt_tokens": -2}
    )
    assert "must be -1, or an integer of at least 1" in refused.json()["error"]["message"]


def test_the_last_message_is_continued():
    runner = MockRunner(says("ok"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once upon"}]
    chat(runner, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert TOKENIZER.decode(runner.prefilled[-1]).endswith("assistant: Once upon")
    chat(runner, messages=messages, add_generation_prompt=False)
    assert TOKENIZER.decode(runner.prefilled[-1]).endswith("assistant: Once upon\n\n")
    both = {"model": MODEL, "messages": messages, "continue_final_message": True}
    refused = post(MockRunner(), "/v1/chat/completions", both).json()["error"]
    assert "send add_generation_prompt = false" in refused["message"]


def test_words_that_an_answer_may_not_have():
    answers = [
        complete(MockRunner(says("abcab")), temperature=0, bad_words=words, max_tokens=5)["choices"][0][
            "text"
        ]
        for words in (["c"], ["bc"], ["abc", "b"])
    ]
    assert answers[0][:2] == answers[1][:2] == "ab" and answers[0][2] != "c" and answers[1][2] != "c"
    assert "b" not in answers[2]


def test_log_probabilities_of_the_prompt():
    told = complete(MockRunner(count_up), prompt="abd", prompt_logprobs=1, temperature=0, max_tokens=1)
    scores = told["choices"][0]["prompt_logprobs"]
    b, c, d = ids("bcd")
    assert scores[0] is None and scores[1][str(b)]["rank"] == 1 and scores[1][str(b)]["logprob"] > -0.01
    assert [scores[2][str(token)]["rank"] for token in (c, d)] == [1, None]
    assert scores[2][str(c)]["decoded_token"] == "c" and scores[2][str(d)]["logprob"] < -19
    assert told["choices"][0]["logprobs"] is None
    assert len(chat(MockRunner(says("a")), prompt_logprobs=0)["prompt_logprobs"]) > 9
    streamed = {"model": MODEL, "prompt": "x", "prompt_logprobs": 1, "stream": True}
    refused = post(MockRunner(), "/v1/completions", streamed).json()["error"]
    assert refused["message"] == "prompt_logprobs cannot be streamed"


@pytest.mark.parametrize("disabled", [False, True])
def test_blanks_in_json_are_bounded(disabled):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"n": {"const": 7}},
        "required": ["n"],
        "additionalProperties": False,
    }
    body = complete(
        MockRunner(lambda *_: ids("\n")[0], context=400),
        temperature=0,
        max_tokens=200,
        structured_outputs={"json": schema, "disable_any_whitespace": disabled},
    )
    [choice] = body["choices"]
    assert json.loads(choice["text"]) == {"n": 7} and choice["finish_reason"] == "stop"
    assert choice["text"].count("\n") == (0 if disabled else 4)


def test_an_answer_cut_within_a_character_ends_in_one_replacement():
    for text, limit, right in (("👋🏽é", 5, "👋�"), ("aé", 2, "a�"), ("👋", 3, "�")):
        [choice] = complete(MockRunner(says(text)), temperature=0, max_tokens=limit)["choices"]
        assert choice["text"] == right


@pytest.mark.parametrize(("num_tokens", "arguments"), [(4, None), (30, '{"n'), (12, "")])
def test_a_required_call_that_is_cut(num_tokens, arguments):
    pytest.importorskip("llguidance")
    runner = MockRunner(says('{"name": "f", "arguments": {"n": 7}}'), context=400)
    for body in with_tools(runner, tool_choice="required", max_tokens=num_tokens, temperature=0):
        [choice] = body["choices"]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]
        calls = choice["message"].get("tool_calls", [])
        assert [call["function"]["arguments"] for call in calls] == ([] if arguments is None else [arguments])


@pytest.mark.parametrize("name", ["audio", "prediction", "reasoning_effort", "web_search_options"])
def test_fields_of_openai_that_are_lacking_are_known(name):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], name: {"x": 1}}
    error = post(MockRunner(), "/v1/chat/completions", body).json()["error"]
    assert error["code"] == "unsupported_parameter" and f"{name} is not supported" in error["message"]


def test_a_long_text_is_refused_before_it_is_tokenised(monkeypatch):
    def never(self, *_, **__):
        raise AssertionError("tokenised")

    monkeypatch.setattr("meshwright.serve.text.tokenizer.Tokenizer.ids", never)
    text = "x" * 1_000_000

    async def main():
        async with client(MockRunner()) as http:
            said = {"messages": [{"role": "user", "content": text}]}
            return [
                await http.post(path, json={"model": MODEL} | body)
                for path, body in (
                    ("/v1/completions", {"prompt": text}),
                    ("/v1/chat/completions", said),
                    ("/tokenize", said),
                    ("/tokenize", {"prompt": text}),
                )
            ]

    for response in asyncio.run(main()):
        assert response.status_code == 400
        assert "has 1000000 characters, more than 64 tokens can be" in response.json()["error"]["message"]
