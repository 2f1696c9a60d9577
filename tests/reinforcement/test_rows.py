"""Rows of rollouts, seeds, prompts and rewards, without devices."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import DataError, MeshwrightError
from meshwright.reinforcement.prompts import Prompt, PromptBatches, prepare_prompts
from meshwright.reinforcement.rewards import FunctionReward, JudgeReward
from meshwright.reinforcement.rollouts import Rollout, pack_rollouts, seed_of
from meshwright.reinforcement.settings import RlSettings, rl_settings, save_rl_settings
from meshwright.train.row_codes import BEGINS, ID_BITS, UNCOUNTED

SEQ_LEN = 12
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=12)


@given(LENGTHS)
def test_every_rollout_is_in_the_rows_once(lengths: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(1, 90, prompt).tolist()) for prompt, _ in lengths]
    rollouts = [
        Rollout(tuple(random.integers(1, 90, n).tolist()), tuple(-random.random(n)), False)
        for _, n in lengths
    ]
    rows = pack_rollouts(prompts, rollouts, SEQ_LEN)
    counted = (rows.tokens & (BEGINS | UNCOUNTED)) == 0
    assert np.array_equal(counted, rows.rollout >= 0)
    for number, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        (row,) = set(np.argwhere(rows.rollout == number)[:, 0].tolist())
        places = np.flatnonzero(rows.rollout[row] == number)
        begin = places[0] - len(prompt)
        assert tuple(rows.tokens[row, places] & ID_BITS) == rollout.tokens
        assert rows.log_probs[row, places] == pytest.approx(rollout.log_probs, rel=1e-6)
        assert tuple(rows.tokens[row, begin : places[0]] & ID_BITS) == prompt
        begins = (rows.tokens[row, begin : places[-1] + 1] & BEGINS) != 0
        assert begins[0] and not begins[1:].any()
    part = rows.part([0], 3)
    assert part.tokens.shape == (3, SEQ_LEN + 1) and (part.rollout[1:] == -1).all()


def test_seeds_differ_by_prompt_and_sample() -> None:
    seeds = {seed_of(3, index, sample) for index in range(40) for sample in range(8)}
    assert len(seeds) == 320 and seed_of(3, 1, 2) == seed_of(3, 1, 2) != seed_of(4, 1, 2)


def test_an_epoch_has_every_prompt_once() -> None:
    prompts = [Prompt(number, {}, (number,)) for number in range(10)]
    batches = PromptBatches(prompts, 5, seed=1)
    first, second = batches.at(0), batches.at(5)
    assert first.following == second.now
    assert sorted(one.number for one in (*first.now, *second.now)) == list(range(10))
    assert [one.number for one in batches.at(10).now] != [one.number for one in first.now]
    assert batches.at(0) == first


def test_prompts_are_kept_in_the_run(tmp_path: Path) -> None:
    source, data = tmp_path / "prompts.jsonl", tmp_path / "data"
    source.write_text('{"prompt": "1 2 >", "answer": 3}\n\n{"prompt": "4 >"}\n')
    options = {"vocab_size": 257, "seq_len": 16, "output_tokens": 8, "tokenizer": None}
    made = prepare_prompts(str(source), data, **options)
    assert [prompt.number for prompt in made.prompts] == [1, 3] and made.prompts[0].row["answer"] == 3
    source.write_text("changed")
    again = prepare_prompts(str(source), data, **options)
    assert again.fingerprint == made.fingerprint and again.prompts == made.prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: is not JSON"),
        ('{"text": "a"}', 'line 1: write {"prompt": TEXT}'),
        ('{"messages": [1]}', 'line 1: write {"prompt": TEXT}'),
        ("\n", "has no prompts"),
        (json.dumps({"prompt": "a long prompt of many letters"}), "fits: --output-tokens"),
        (
            '{"prompt": "a"}\n{"prompt": "a \\ud800"}',
            "line 2: U+D800 at character 14 is half a surrogate pair",
        ),
    ],
)
def test_bad_prompts_are_named(text: str, message: str, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text(text)
    with pytest.raises(DataError) as error:
        prepare_prompts(
            str(source), tmp_path / "data", vocab_size=257, seq_len=32, output_tokens=31, tokenizer=None
        )
    assert message in str(error.value) and "\n" not in str(error.value)


def test_repaired_prompts_are_read(tmp_path: Path) -> None:
    source, options = tmp_path / "prompts.jsonl", {"vocab_size": 257, "seq_len": 32, "output_tokens": 8}
    source.write_text(json.dumps({"prompt": "a long prompt of many letters"}))
    with pytest.raises(DataError):
        prepare_prompts(str(source), tmp_path / "data", **options, tokenizer=None)
    source.write_text('\ufeff{"prompt": "a\u2028b"}')  # a line separator is no end of a line of JSON
    made = prepare_prompts(str(source), tmp_path / "data", **options, tokenizer=None)
    assert [prompt.row["prompt"] for prompt in made.prompts] == ["a\u2028b"]


def test_a_function_scores_answers(tmp_path: Path) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(
        "def score(row, answer):\n    return answer == row['answer']\n"
        "def fails(row, answer):\n    return row['nothing']\n"
        "def nan(row, answer):\n    return float('nan')\n"
    )
    assert FunctionReward(f"{path}:score")([{"answer": "3"}] * 2, ["3", "4"]) == [1.0, 0.0]
    for name, message in {
        "fails": "fails on the answer '3': KeyError",
        "nan": "gives nan for the answer '3'",
        "missing": "has no function missing",
        "no/name": "write FILE.py:FUNCTION",
    }.items():
        with pytest.raises(MeshwrightError) as error:
            FunctionReward(f"{path}:{name}")([{}], ["3"])
        assert message in str(error.value) and "\n" not in str(error.value)


def test_a_judge_reads_the_row(tmp_path: Path) -> None:
    template = tmp_path / "judge.txt"
    template.write_text("{prompt} should be {right}: {answer} {")
    judge = JudgeReward("http://localhost:1", template)
    assert judge._prompt({"prompt": "1+1", "right": 2}, "{prompt}") == "1+1 should be 2: {prompt} {"
    with pytest.raises(MeshwrightError, match=r"\{right\} is no key of the row; keys: prompt"):
        judge._prompt({"prompt": "1+1"}, "2")
    with pytest.raises(MeshwrightError, match="gives no score"):
        judge([{"prompt": "1+1", "right": 2}], ["2"])
    with pytest.raises(MeshwrightError, match="write http"):
        JudgeReward("localhost", None)


class Judge(BaseHTTPRequestHandler):
    """Replies with the answer's number, or with a text that has none."""

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "judge" and body["temperature"] == 0
        answer = body["messages"][0]["content"].rpartition("Answer:\n")[2].split("\n")[0]
        reply = f"I give {answer}." if answer != "?" else "no idea"
        self._reply({"choices": [{"message": {"content": reply}}]})

    def _reply(self, document: object) -> None:
        text = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_served_judge_scores_answers() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        judge = JudgeReward(f"http://127.0.0.1:{server.server_address[1]}/v1", None)
        assert judge([{"prompt": "a"}] * 3, ["0.5", "-2", "?"]) == [0.5, -2.0, 0.0]
        assert judge.unread == 1
        server.shutdown()


def test_settings_are_kept_by_a_resumed_run(tmp_path: Path) -> None:
    settings = RlSettings(judge="http://a", samples=4)
    save_rl_settings(settings, tmp_path)
    assert rl_settings(tmp_path, {}, resumes=True) == settings
    assert rl_settings(tmp_path, {"judge": "http://b"}, resumes=True).judge == "http://b"
    with pytest.raises(MeshwrightError, match="began with --samples 4, not 8"):
        rl_settings(tmp_path, {"samples": 8}, resumes=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither is given"),
        ({"reward": "a.py:b", "judge": "http://a"}, "both are given"),
        ({"reward": "a.py:b", "samples": 1}, "--samples 1"),
        ({"reward": "a.py:b", "judge_template": "a"}, "--judge-template"),
    ],
)
def test_bad_settings_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(MeshwrightError, match=message):
        RlSettings(**given)  # pyright: ignore[reportArgumentType]
