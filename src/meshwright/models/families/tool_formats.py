"""Formats of tool calls in the answers of models."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """How the answers of a model call tools: JSON objects with a name and arguments.

    markers: the strings that a call may begin with; end: the string after it. argument_keys: the keys that
    may hold the arguments. bare: a call may also be the whole answer. in_template: words of a chat template
    that teaches the format without a marker.
    """

    name: str
    markers: tuple[str, ...]
    argument_keys: tuple[str, ...]
    end: str = ""
    bare: bool = False
    in_template: tuple[str, ...] = ()


# <tool_call>{"name": ..., "arguments": {...}}</tool_call>, repeated
HERMES = ToolFormat("hermes", ("<tool_call>",), ("arguments", "parameters"), end="</tool_call>")
# [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
MISTRAL_CALLS = ToolFormat("mistral", ("[TOOL_CALLS]",), ("arguments", "parameters"))
# {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>. Templates since Llama 3.1 spell the form
# out, and name the role of a tool's answer.
LLAMA_CALLS = ToolFormat(
    "llama",
    ("<|python_tag|>",),
    ("parameters", "arguments"),
    bare=True,
    in_template=("ipython", '"parameters"'),
)
