"""Hostile requests by name, each a function that makes (path, body): some bodies take tens of megabytes.

The list grows with each fault that is found.
"""

import json

from tests.serve.http.client import MODEL

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
DEPTH = 3000


def completion(**fields: object) -> tuple[str, bytes]:
    return TEXT, json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2} | fields).encode()


def chat(messages: object, **fields: object) -> tuple[str, bytes]:
    return CHAT, json.dumps({"model": MODEL, "messages": messages} | fields).encode()


def _nested(before: str, after: str, depth: int = DEPTH) -> str:
    return before * depth + '{"type": "integer"}' + after * depth


def _references() -> dict[str, object]:
    definitions: dict[str, object] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(DEPTH)}
    return {"$defs": definitions | {f"d{DEPTH}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _alternatives() -> dict[str, object]:
    definitions: dict[str, object] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"type": "null"}]} for i in range(DEPTH)
    }
    return {"$defs": definitions | {f"d{DEPTH}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


def _rules() -> str:
    chain = "\n".join(f'r{i}: r{i + 1} "a"' for i in range(DEPTH))
    return f'start: r0\n{chain}\nr{DEPTH}: "b"\n'


HI = {"role": "user", "content": "hi"}
# Grammars that a library follows by recursion.
GRAMMARS = {
    "a chain of references": lambda: completion(guided_json=_references()),
    "a chain of alternatives": lambda: completion(guided_json=_alternatives()),
    "a schema as text, nested": lambda: completion(guided_json=_nested('{"anyOf": [', "]}")),
    "a chain of rules": lambda: completion(guided_grammar=_rules()),
    "nested groups of a rule": lambda: completion(guided_grammar=f'start: {"(" * DEPTH}"a"{")" * DEPTH}'),
    "nested groups of an expression": lambda: completion(guided_regex=f"{'(' * 9000}a{')' * 9000}"),
    "repetitions of repetitions": lambda: completion(guided_regex="(((a{1,1000}){1,1000}){1,1000}){1,1000}"),
    "an expression with more states than a lexer may have": lambda: completion(guided_regex="a{1000000000}"),
    "a choice of many bytes": lambda: completion(guided_choice=["é" * 1_000_000]),
    "an expression of many states": lambda: completion(guided_regex="(a|b)*a(a|b){300}"),
    "a schema of tools": lambda: chat(
        [HI],
        tools=[{"type": "function", "function": {"name": "f", "parameters": _references()}}],
        tool_choice="required",
    ),
}
# Values that the engine or the host once could not compute with.
VALUES = {
    "stop tokens of another model": lambda: completion(stop_token_ids=[5000, 2**31 - 1], min_tokens=1),
    "a number of thousands of digits": lambda: (
        TEXT,
        b'{"model": "tiny", "prompt": "x", "max_tokens": %b}' % (b"9" * 4300),
    ),
    "a model's name of megabytes": lambda: (
        TEXT,
        json.dumps({"model": "x" * 10_000_000, "prompt": "x"}).encode(),
    ),
    "a field's name of megabytes": lambda: completion(**{"x" * 10_000_000: 1}),
    "a token's name of megabytes": lambda: completion(logit_bias={"x" * 10_000_000: 1}),
    "biases of all tokens": lambda: completion(logit_bias={str(token): -100 for token in range(300)}),
    "tiny numbers": lambda: completion(temperature=5e-324, top_p=5e-324, repetition_penalty=5e-324, min_p=1),
}
# Small or large bodies of many things, with the seconds or bytes that each once took.
COUNTS = {
    "8,000 prompts of 128 answers": lambda: completion(prompt=["a"] * 8000, n=128),
    "500 prompts of 128 answers": lambda: completion(prompt=["a"] * 500, n=128),
    "128 answers to 90,000 tokens": lambda: completion(prompt=[1] * 90_000, n=128),
    "128 answers to 90,000 tokens, half of them known": lambda: completion(
        prompt=[1] * 45_000 + [*range(1, 226)] * 200, n=128, stream=True
    ),
    "500,000 prompts": lambda: completion(prompt=["a"] * 500_000),
    "2,000,000 allowed tokens": lambda: completion(allowed_token_ids=[1] * 2_000_000, n=128),
    "2,000,000 stop tokens": lambda: completion(stop_token_ids=[1] * 2_000_000, n=128),
    "500,000 unknown fields": lambda: completion(**{f"k{i}": 1 for i in range(500_000)}),
    "500,000 biases": lambda: completion(logit_bias={str(i): 1 for i in range(500_000)}),
    "150,000 messages": lambda: chat([HI] * 150_000),
    "300,000 parts": lambda: chat([{"role": "user", "content": [{"type": "text", "text": "x"}] * 300_000}]),
    "5,000,000 tokens as text": lambda: ("/detokenize", json.dumps({"tokens": [1] * 5_000_000}).encode()),
    "10,000,000 characters": lambda: ("/tokenize", json.dumps({"prompt": "x" * 10_000_000}).encode()),
    "nested lists": lambda: (TEXT, b"[" * 15_000_000),
    "nested objects": lambda: (TEXT, b'{"prompt":' * 1_000_000),
    "a harmless field of many objects": lambda: (
        TEXT,
        b'{"model": "tiny", "prompt": "x", "metadata": [' + b'{"a":1},' * 1_500_000 + b"1]}",
    ),
    "60 prompts with the scores of 250 tokens": lambda: completion(
        prompt=[[1] * 250] * 60, echo=True, logprobs=20, max_tokens=1
    ),
    "128 answers with the scores of 6,000 tokens": lambda: completion(
        prompt="é" * 3000, n=128, echo=True, logprobs=20, prompt_logprobs=20
    ),
    "1,000 forbidden words of 15,000 characters": lambda: completion(bad_words=["word " * 3000] * 1000),
    "long stop strings": lambda: completion(stop=["a" * 4_000_000] * 3, n=128),
    "300,000 inputs": lambda: (
        "/v1/embeddings",
        json.dumps({"model": MODEL, "input": ["a"] * 300_000}).encode(),
    ),
}
