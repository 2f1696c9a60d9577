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
    ("route", "profile"),
    [("/v1/completions", "kind=concurrent,streams=4"), ("/v1/chat/completions", "kind=poisson,rate=20")],
)
def test_guidellm_measures_every_request(route, profile, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().tokenizer, eos_token="<eos>")
    tokenizer.save_pretrained(tmp_path)
    found_at = tmp_path / "found.json"
    with server_process() as (_, url):
        asked = {
            "--backend": f"kind=openai_http,target={url},request_format={route}",
            "--profile": profile,
            "--constraint": "kind=max_requests,count=12",
            "--tokenizer": f"kind=huggingface_auto,model={tmp_path}",
            "--data": f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={ANSWER}",
            "--output": f"kind=json,path={found_at}",
        }
        words = [word for pair in asked.items() for word in pair]
        subprocess.run(["guidellm", "run", *words, "--disable-console"], check=True)
    [found] = json.loads(found_at.read_text(encoding="utf-8"))["benchmarks"]
    requests = found["requests"]
    assert (len(requests["successful"]), requests["errored"]) == (12, [])
    for request in requests["successful"]:
        assert request["output_tokens"] == ANSWER and request["prompt_tokens"] >= PROMPT
