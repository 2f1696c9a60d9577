"""lm-evaluation-harness asks a server of ours for log-likelihoods by its `local-completions`."""

import math

import pytest
from tests.serve.http.client import MODEL
from tests.serve.http.mock_server import ANSWER, answer
from tests.serve.http.process import server_process
from tests.serve.mock import EOS, MockRunner, byte_tokenizer

pytestmark = pytest.mark.slow
harness = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")


@pytest.mark.filterwarnings("default")  # the harness' own
def test_the_harness_reads_the_log_likelihoods_of_the_model(tmp_path):
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.tokenizer, eos_token="<eos>").save_pretrained(tmp_path)
    pairs = [("x", "naive"), ("question", ": n"), ("n", "n"), ("", "nn"), ("na", ANSWER)]
    with server_process() as (_, url):
        model = harness.LocalCompletionsAPI(
            model=MODEL,
            base_url=f"{url}/v1/completions",
            tokenizer=str(tmp_path),
            tokenizer_backend="huggingface",
            batch_size=2,
            num_concurrent=1,
            max_length=512,
        )
        found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)])
    for (context, continuation), (likelihood, is_greedy) in zip(pairs, found, strict=True):
        before = [*tokenizer.encode(context)] if context else [EOS]
        tokens = [*before, *tokenizer.encode(continuation)]
        scores = MockRunner(answer).scores(tokens)
        own = scores[len(before) - 1 :]
        assert math.isclose(likelihood, sum(score.logprob for score in own), abs_tol=1e-3)
        assert is_greedy == all(score.top[0][0] == score.token for score in own)
    assert {is_greedy for _, is_greedy in found} == {True, False}
