"""The load test: its traffic from a seed, its figures worked by hand, and a whole run against a server."""

import asyncio
import json
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tests.serve.http.process import server_process

from meshwright.cli.main import main
from meshwright.errors import DataError, RequestError
from meshwright.load import traffic
from meshwright.load.client import Client
from meshwright.load.drive import fit_words
from meshwright.load.filler_text import Words
from meshwright.load.percentiles import load_figures, percentiles
from meshwright.load.planned import draft_counts, planned_step_seconds
from meshwright.load.settings import LatencyTargets
from meshwright.load.timed_answer import TimedAnswer
from meshwright.load.traffic import Chat, Lengths, Turn


def test_lengths_have_the_published_means_and_one_seed_gives_one_traffic():
    lengths = traffic.named_lengths("sharegpt", None, None)
    turns = lengths.draw(np.random.default_rng(0), 20_000)
    # Four standard errors of a log-normal mean with spread 1: 4 * sqrt(e - 1) / sqrt(20000).
    assert np.mean([turn.prompt_tokens for turn in turns]) == pytest.approx(161.31, rel=0.037)
    assert np.mean([turn.output_tokens for turn in turns]) == pytest.approx(337.99, rel=0.037)
    drawn = [traffic.chats(lengths, 10, 1, traffic.at_once(), seed) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_fixed_lengths_are_exact():
    lengths = traffic.named_lengths("fixed", 100, 7)
    assert set(lengths.draw(np.random.default_rng(0), 50)) == {Turn(100, 7)}
    with pytest.raises(DataError, match=r"^lengths 'sharegtp' are unknown; did you mean sharegpt"):
        traffic.named_lengths("sharegtp", None, None)


def test_poisson_arrivals_have_their_rate_and_bursts_arrive_together():
    times = list(islice(traffic.poisson(5.0, 1, seed=0), 4000))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=4 / 4000**0.5)  # four standard errors
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution
    bursts = list(islice(traffic.poisson(5.0, 4, seed=0), 4000))
    assert all(len(set(bursts[first : first + 4])) == 1 for first in range(0, 4000, 4))
    assert bursts[-1] / 4000 == pytest.approx(0.2, rel=4 / 1000**0.5)


def test_requests_are_grouped_to_chats():
    found = traffic.chats(Lengths(8, 4), 7, 3, traffic.at_once(), 0)
    assert [len(chat.turns) for chat in found] == [3, 3, 1]


def test_turns_are_cut_to_the_context():
    [cut] = traffic.within([Chat(0.0, (Turn(500, 400), Turn(500, 400)))], 1000, prefix_tokens=100)
    assert sum(turn.prompt_tokens + turn.output_tokens for turn in cut.turns) <= 900
    assert cut.turns[0] == Turn(392, 392)
    with pytest.raises(
        DataError, match=r"^a prefix of 900 tokens leaves no room in the server's context of 1000"
    ):
        traffic.within([Chat(0.0, (Turn(5, 5),))], 1000, prefix_tokens=900)


def test_a_trace_is_read_and_its_faults_are_named(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    rows = [{"arrival_seconds": at, "prompt_tokens": 5, "output_tokens": 6} for at in (2.0, 0.5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert traffic.read_trace(path) == [Chat(0.5, (Turn(5, 6),)), Chat(2.0, (Turn(5, 6),))]
    for text, message in (
        ("", "holds no request"),
        ('{"arrival_seconds": 1}', r'trace.jsonl:1: {"arrival_seconds": 1} is no request; a line reads'),
        ("[1]", r"trace.jsonl:1: \[1\] is no request"),
        ("prompt " * 99, r"trace.jsonl:1: prompt prompt .*\.\.\. is no request"),
        (json.dumps(rows[0] | {"arrival_seconds": -1}), "arrival_seconds from 0 on"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            traffic.read_trace(path)
    with pytest.raises(DataError, match="No such file"):
        traffic.read_trace(tmp_path / "missing")


def test_words_are_fitted_to_what_the_server_counts():
    words = Words.fitted((16, 16 * 3 + 10), (144, 144 * 3 + 10))
    assert (words.tokens_per_word, words.overhead_tokens) == (3.0, 10.0)
    assert len(words.text(310, "a").split()) == 100
    assert words.text(310, "a") == words.text(310, "a") != words.text(310, "b")
    assert Words.fitted((16, 0), (144, 0)) == Words()


class SmallServer:
    """A server of a short context that counts two tokens a word, and refuses more than it holds."""

    url = "http://small"

    def __init__(self, context: int) -> None:
        self.context = context

    async def ask(self, text: str, max_tokens: int) -> TimedAnswer:
        tokens = 2 * len(text.split())
        error = "400: too long" if tokens + max_tokens > self.context else None
        return TimedAnswer(0.0, prompt_tokens=tokens, error=error)


@pytest.mark.parametrize("context", [512, 200, 130, 80])
def test_a_server_of_a_short_context_is_probed_with_fewer_words(context: int) -> None:
    words = asyncio.run(fit_words(SmallServer(context), chat=False))  # pyright: ignore[reportArgumentType]
    assert words.tokens_per_word == 2.0


def test_a_context_that_holds_no_probe_is_named() -> None:
    with pytest.raises(RequestError, match="http://small refuses a request of 32 words: 400: too long"):
        asyncio.run(fit_words(SmallServer(40), chat=False))  # pyright: ignore[reportArgumentType]


def answer(start: float, pieces: list[float], error: str | None = None) -> TimedAnswer:
    end = pieces[-1] if pieces else start
    return TimedAnswer(start, pieces, end, prompt_tokens=3, num_tokens=len(pieces), error=error)


def test_the_figures_by_hand():
    answers = [answer(0.0, [1.0, 1.5, 2.0]), answer(1.0, [1.5, 5.0]), answer(2.0, [2.5], error="500: x")]
    found = load_figures(answers, LatencyTargets(ttft_seconds=0.9))
    assert (found["requests"], found["errors"], found["error_messages"]) == (3, 1, {"500: x": 1})
    assert (found["seconds"], found["new_tokens"], found["prompt_tokens"]) == (5.0, 5, 6)
    assert (found["new_tokens_per_second"], found["requests_per_second"]) == (1.0, 0.4)
    assert found["goodput"] == 0.2
    assert (found["ttft_seconds"]["p50"], found["ttft_seconds"]["max"]) == (0.75, 1.0)
    assert found["tpot_seconds"]["mean"] == (0.5 + 3.5) / 2
    assert found["itl_seconds"]["p50"] == 0.5
    assert load_figures(answers, LatencyTargets(tpot_seconds=1.0))["goodput"] == 0.2
    assert load_figures(answers, LatencyTargets())["goodput"] == 0.4
    assert percentiles([])["p99"] is None


def test_events_of_other_servers_are_understood():
    client, got = Client("http://127.0.0.1:1/v1"), TimedAnswer(0.0)
    assert client.url == "http://127.0.0.1:1"
    for event in (
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"reasoning_content": "hm"}}]}',
        '{"choices": [{"delta": {"content": "a"}}], "usage": null}',
        '{"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 9}}',
    ):
        assert not client._take(event, got)
    assert (got.text, len(got.piece_seconds), got.prompt_tokens, got.num_tokens) == ("hma", 2, 4, 9)
    assert client._take("[DONE]", got)
    client._take("<html>", got)
    assert got.error == "an event that is not a completion: <html>"


def test_the_planned_step_is_read_from_the_metrics():
    assert planned_step_seconds("meshwright:planned_step_seconds 0.25\n") == 0.25
    assert planned_step_seconds("vllm:x 1\n") is None
    assert planned_step_seconds("<html>{") is None
    counts = "vllm:spec_decode_num_draft_tokens_total 8\nvllm:spec_decode_num_accepted_tokens_total 3\n"
    assert draft_counts(counts) == (8, 3) and draft_counts("vllm:x 1\n") == (0, 0)


def run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict, str]:
    code = main(["bench", "serve", *options, "--json"])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else {}, printed.err


def test_a_server_under_load(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    with server_process() as (_, url):
        common = ["--url", url, "--output-tokens", "8", "--prompt-tokens", "20"]
        code, found, _ = run(capsys, *common, "--requests", "6", "--concurrency", "2", "--ttft", "60")
        assert (code, found["requests"], found["errors"]) == (0, 6, 0)
        assert found["model"] == "tiny" and found["new_tokens_per_second"] > 0 and found["goodput"] > 0
        for key in ("ttft_seconds", "tpot_seconds", "itl_seconds"):
            assert 0 < found[key]["p50"] <= found[key]["p95"] <= found[key]["p99"]
        path = tmp_path / "load.json"
        chats = ["--chat", "--turns", "3", "--prefix-tokens", "30", "--rate", "200", "--burst", "2"]
        code, found, _ = run(capsys, *common, *chats, "--requests", "6", "-o", str(path))
        assert (code, found["requests"], found["traffic"]["arrivals"]) == (0, 6, "poisson")
        later = [row["prompt_tokens"] for row in found["answers"][:3]]
        assert later == sorted(later) and later[0] < later[2]  # a turn holds the turns before it
        code, found, _ = run(capsys, *common, "--requests", "2", "--timeout", "0.001", "--model", "other")
        assert code == 2
        for traffic, arrivals in (("--concurrency", "closed"), ("--rate", "poisson")):
            began = time.monotonic()
            code, found, err = run(capsys, *common, traffic, "3", "--duration", "2s")
            assert (code, found["errors"], found["traffic"]["arrivals"]) == (0, 0, arrivals), err
            assert 2 <= time.monotonic() - began < 60 and found["traffic"]["duration_seconds"] == 2
            assert len(found["answers"]) == found["requests"] > 1
    assert main(["report", str(path), "-o", str(tmp_path / "load.html")]) == 0
    assert "time to first token" in (tmp_path / "load.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--url", "http://127.0.0.1:9"],
            "no OpenAI-compatible server answers at http://127.0.0.1:9/v1/models",
        ),
        (
            ["--url", "http://x", "--rate", "1", "--concurrency", "1"],
            "--concurrency, --rate and --trace cannot be combined",
        ),
        (["--url", "http://x", "--burst", "2"], "--burst needs --rate"),
        (["--url", "ftp://x"], "--url ftp://x: write http://HOST:PORT or https://HOST"),
        (
            ["--url", "http://x", "--mode", "batched", "--drafts", "2"],
            "the server at --url decides that itself; leave out --mode, --drafts",
        ),
        (["--plan", "x.toml", "--chat"], "--plan asks no server; leave out --chat"),
        (
            ["--plan", "x.toml", "--prefill-replicas", "2"],
            "only --mode disaggregated has them; leave out --prefill-replicas",
        ),
        (["--plan", "x.toml", "--acceptance", "0.5"], "without --drafts there are none to accept"),
    ],
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    code, _, error = run(capsys, *options)
    assert code == 2 and message in error.splitlines()[-1]


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Plans that serve 1,152 positions, by their layouts."""
    folder, found = tmp_path_factory.mktemp("plans"), {}
    asked = ["--model", "llama-3-8b", "--hardware", "h100:1x2", "--prompt-tokens", "1k"]
    for layout in ("tensor=2", "data=2"):
        found[layout] = str(folder / f"{layout}.toml")
        words = [*asked, "--output-tokens", "128", "--layout", layout, "-o", found[layout]]
        assert main(["plan", "serve", *words]) == 0
    return found


def test_servers_apart_are_simulated_as_they_run(plans: dict[str, str], capsys: pytest.CaptureFixture[str]):
    """A layout with several caches cannot hand pages over, and those that came from there are no hits."""
    load = ["--requests", "20", "--lengths", "fixed", "--prompt-tokens", "256", "--output-tokens", "8"]
    apart = ["--mode", "disaggregated", "--rate", "50"]
    code, found, _ = run(capsys, "--plan", plans["tensor=2"], *apart, *load)
    assert (code, found["requests"], found["cut"]) == (0, 20, 0)
    assert found["simulated"]["prefix_hit_rate"] == 0 and found["simulated"]["prefill_replicas"] == 1
    code, _, error = run(capsys, "--plan", plans["data=2"], *apart, *load)
    assert code == 2 and "hands over pages of one cache, and data=2" in error.splitlines()[-1]


def test_a_target_that_no_number_of_servers_meets_is_named(
    plans: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    load = ["--requests", "4", "--rate", "5", "--replicas", "0", "--ttft", "60", "--tpot", "0.0001"]
    code, _, error = run(capsys, "--plan", plans["tensor=2"], *load)
    assert code == 1
    assert "--tpot 100 us, where 95% are within" in error and "--ttft" not in error.splitlines()[-1][:200]


def test_what_is_cut_to_the_context_is_said(plans: dict[str, str], capsys: pytest.CaptureFixture[str]):
    load = ["--requests", "3", "--lengths", "fixed", "--prompt-tokens", "5000", "--output-tokens", "8"]
    code, found, error = run(capsys, "--plan", plans["tensor=2"], *load)
    assert (code, found["requests"], found["cut"]) == (0, 3, 3)
    assert "warning: 3 requests shortened or left out to fit the context" in error
