"""guidellm, a load generator, drives a server of ours as it would drive vLLM."""

import json
import shutil
import subprocess

import pytest
from tests.serve.http.process import server_process
from tests.serve.mock import byte_tokenizer

pytestmark = pytest.mark.slow
PROMPT, ANSWER = 40, 12
# It has an environment of its own, since it asks for an older click than ours.
GUIDELLM = shutil.which("guidellm")


@pytest.mark.skipif(GUIDELLM is None, reason="no guidellm on the PATH")
@pytest.mark.parametrize(
    ("route", "kind", "rate"),
    [("text_completions", "concurrent", "4"), ("chat_completions", "poisson", "20")],
)
def test_guidellm_measures_every_request(route, kind, rate, tmp_path, monkeypatch):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().tokenizer, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setenv("GUIDELLM__PREFERRED_ROUTE", route)
    data = f"prompt_tokens={PROMPT},output_tokens={ANSWER},samples=16"
    lengths = ["--data", data, "--processor", tmp_path, "--max-requests", "12"]
    asked = [
        "--rate-type",
        kind,
        "--rate",
        rate,
        *lengths,
        "--output-path",
        tmp_path / "found.json",
        "--disable-progress",
    ]
    with server_process() as (_, url):
        subprocess.run(["guidellm", "benchmark", "run", "--target", url, *asked], check=True)
    [found] = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["benchmarks"]
    requests = found["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (12, [])
    for request in requests["successful"]:
        assert request["output_tokens"] == ANSWER and request["prompt_tokens"] >= PROMPT
