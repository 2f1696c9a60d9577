"""Calls of tools as families write them, and text that only looks like one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.models.families.tool_formats import HERMES, ToolFormat
from meshwright.models.families.tool_formats import LLAMA_CALLS as LLAMA
from meshwright.models.families.tool_formats import MISTRAL_CALLS as MISTRAL
from meshwright.serve.text.tools import Call, ToolText, format_of_template

WEATHER = Call("weather", '{"city": "Köln"}')
HERMES_TEXT = 'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
MISTRAL_TEXT = '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln"}}]'
LLAMA_TEXT = '{"name": "weather", "parameters": {"city": "Köln"}}'


def separated(form: ToolFormat, pieces: list[str], *, forced: bool = False) -> tuple[str, list[Call]]:
    text = ToolText(form, forced=forced)
    said = "".join(text.push(piece) for piece in pieces)
    rest, calls = text.finish()
    return said + rest, list(calls)


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, HERMES_TEXT, "Let me look.\n", [WEATHER]),
        (HERMES, HERMES_TEXT + HERMES_TEXT.removeprefix("Let me look."), "Let me look.\n", [WEATHER] * 2),
        (HERMES, "no <tool_ca", "no <tool_ca", []),
        (HERMES, "<tool_call>{broken", "<tool_call>{broken", []),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (MISTRAL, MISTRAL_TEXT, "", [WEATHER]),
        (LLAMA, LLAMA_TEXT, "", [WEATHER]),
        (LLAMA, f"<|python_tag|>{LLAMA_TEXT}; {LLAMA_TEXT}", "", [WEATHER] * 2),
        (LLAMA, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
        (LLAMA, "plain", "plain", []),
        (HERMES, "", "", []),
    ],
)
def test_calls_are_separated_however_the_text_arrives(form, text, said, calls):
    assert separated(form, [text]) == (said, calls)
    assert separated(form, list(text)) == (said, calls)


def test_a_forced_call_needs_no_marker():
    assert separated(HERMES, ['{"name": "weather", ', '"arguments": {"city": "Köln"}}'], forced=True) == (
        "",
        [WEATHER],
    )


@given(
    st.lists(st.sampled_from(["<tool_call>", "<tool", "{", "}", '"name"', " a", "[TOOL_CALLS]"]), max_size=8)
)
def test_no_text_is_lost_where_there_is_no_call(pieces):
    for form in (HERMES, MISTRAL, LLAMA):
        said, calls = separated(form, pieces)
        assert calls or said == "".join(pieces)


def test_the_format_is_told_from_the_template():
    assert format_of_template("{% if tools %}<tool_call>{% endif %}") is HERMES
    assert format_of_template("[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert format_of_template('{"name": function name, "parameters": {}} ipython') is LLAMA
    assert format_of_template("{{ messages }}") is None
