"""The text of a conversation, in the format that the model was trained on."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.nodes import (
    CallBlock,
    Const,
    Expr,
    ExprStmt,
    Filter,
    For,
    Impossible,
    Macro,
    Node,
    Scope,
    TemplateData,
)
from jinja2.nodes import Template as TemplateNode
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import CheckpointError, RequestError, in_a_line
from meshwright.files import parse_json, read_text

# The longest published templates have some 20,000 characters.
_MOST_CHARS = 1_000_000
# Processor seconds that the rendering of one conversation may take; long ones take a few milliseconds.
_MOST_SECONDS = 5.0
_deadline: ContextVar[float] = ContextVar("_deadline")
_CALLS_PER_CHECK = 64  # the clock is read every 64th time: reading it costs about a short loop's body
_CHECK = "check time"  # the name of our filter; with a blank in it, no template can use or replace it
_calls = count()

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}
{%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}


{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""For checkpoints without a template: `role: content` paragraphs, and `assistant:` to continue."""


class ChatTemplate:
    """A Jinja template over messages, in the dialect of Hugging Face tokenizers.

    special_tokens: `bos_token`, `eos_token`, ... as the template names them. tool_source: another template
    for conversations with tools, None for the same one.
    """

    def __init__(
        self,
        source: str = PLAIN_TEMPLATE,
        special_tokens: Mapping[str, str] | None = None,
        tool_source: str | None = None,
    ) -> None:
        self.source, self.tool_source = source, tool_source
        self._special_tokens = dict(special_tokens or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self._special_tokens, self.tool_source)

    @cached_property
    def _template(self) -> Template:
        return self._parsed(self.source)

    @cached_property
    def _tool_template(self) -> Template:
        return self._template if self.tool_source is None else self._parsed(self.tool_source)

    def _parsed(self, source: str) -> Template:
        # Sandboxed: the template comes with a checkpoint, and a checkpoint is data.
        environment = ImmutableSandboxedEnvironment(
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.code_generator_class = _Generator
        environment.intercepted_binops = frozenset({"*", "**"})
        environment.binop_table |= {"*": _product, "**": _power}
        environment.filters |= {"tojson": _to_json, _CHECK: _check_time}
        del environment.globals["lipsum"]  # one call makes any number of words
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            return environment.from_string(source)
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            fault = in_a_line(error) or type(error).__name__
            raise CheckpointError(f"the checkpoint's chat template does not parse: {fault}") from error

    @property
    def is_plain(self) -> bool:
        """Whether it is the template of checkpoints without one."""
        return self.source == PLAIN_TEMPLATE

    def check(self) -> None:
        """Raise CheckpointError if the template does not parse."""
        _ = self._template, self._tool_template

    def render(self, messages: Sequence[Mapping[str, Any]], **context: object) -> str:
        """The prompt that asks for the next assistant message; RequestError if the template refuses.

        context: further names that the template may read, such as tools. Raises CheckpointError if the
        template does not parse.
        """
        # Names that transformers always passes, so that `tools is not none` means the same.
        names = {"add_generation_prompt": True, "tools": None, "documents": None}
        names |= self._special_tokens | context
        try:
            template = self._tool_template if names["tools"] else self._template
            with _limited(_MOST_SECONDS):
                return template.render(messages=messages, **names)
        except CheckpointError:
            raise
        except Exception as error:  # a template can raise any: it divides by 0, indexes, recurses
            fault = in_a_line(error) or type(error).__name__
            raise RequestError(
                f"the chat template refuses the messages: {fault}", param="messages"
            ) from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template writes tools."""
        return self.tool_source is not None or "tools" in self.source

    def reads(self, key: str) -> bool:
        """Whether the template may write this key of a message: it names the key, or lists all keys."""
        return any(key in source or "items()" in source for source in (self.source, self.tool_source or ""))


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model was not trained on. Arguments as in transformers.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generator(CodeGenerator):
    """Compiles templates without folding constants, and with a check of time in each loop and macro.

    Even with Jinja's optimizer off, `{{ "a" * 10 ** 10 }}` would be folded, before the limits of rendering
    hold.
    """

    def _output_child_to_const(self, node: Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, TemplateData):
            raise Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Template(self, node: TemplateNode, frame: Frame | None = None) -> None:
        # Only loops, and macros that call each other, can run for long.
        for repeated in list(node.find_all((For, Macro, CallBlock))):
            check = Filter(Const(None), _CHECK, [], [], None, None)
            repeated.body.insert(0, ExprStmt(check).set_lineno(repeated.lineno))
        super().visit_Template(node, frame)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Make `_check_time` raise TemplateError after these processor seconds of the thread."""
    token = _deadline.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def _check_time(_: None) -> None:
    """Raise TemplateError if the template that this thread renders takes too long."""
    if next(_calls) % _CALLS_PER_CHECK == 0 and time.thread_time() > _deadline.get():
        raise TemplateError(f"it takes longer than {_MOST_SECONDS:g} s")


def _product(first: Any, second: Any) -> Any:
    """The product of two numbers, or a repeated text or list. Raises TemplateError if it is too long."""
    for value, times in ((first, second), (second, first)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            _check_size(len(value) * times)
    if isinstance(first, int) and isinstance(second, int):
        _check_size(first.bit_length() + second.bit_length())
    return first * second


def _power(base: Any, exponent: Any) -> Any:
    """A power. Raises TemplateError for a whole number that is too long."""
    if isinstance(base, int) and isinstance(exponent, int):
        _check_size(base.bit_length() * exponent)
    return base**exponent


def _check_size(size: int) -> None:
    """Raise TemplateError for a value of more than _MOST_CHARS characters, elements or bits."""
    if size > _MOST_CHARS:
        raise TemplateError(f"a value has a size of {size:,}; at most {_MOST_CHARS:,} fit")


class _Generation(Extension):
    """The tag `{% generation %}...{% endgeneration %}`, which marks answers; its body is rendered."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A scope of its own, as in transformers: names set within are not known after it.
        return [Scope(body, lineno=line)]


def load_chat_template(folder: Path) -> ChatTemplate:
    """The template of a checkpoint in Hugging Face format, PLAIN_TEMPLATE if it has none.

    As in transformers, it is chat_template.jinja, with additional_chat_templates/tool_use.jinja for
    conversations with tools; without these the `chat_template` of tokenizer_config.json (a text, or a list of
    templates with names), and without that the one of chat_template.json, which processors have. Raises
    CheckpointError if they cannot be read.
    """
    config = json_object(folder / "tokenizer_config.json")
    sources = _sources(folder, config)
    return ChatTemplate(
        sources.get("default", PLAIN_TEMPLATE), special_tokens(config), sources.get("tool_use")
    )


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no file; CheckpointError for other content."""
    if not path.exists():
        return {}
    try:
        content = parse_json(read_text(path, CheckpointError))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and the like of a tokenizer_config.json, written as text or as an object with `content`."""
    tokens = {name: value for name, value in config.items() if name.endswith("_token")}
    contents = {
        name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()
    }
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def _sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a checkpoint by name: `default`, `tool_use`."""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    sources: dict[str, Any] = {
        name: read_text(path, CheckpointError) for name, path in files.items() if path.exists()
    }
    path = folder
    if "default" not in sources:
        path, given = folder / "tokenizer_config.json", config.get("chat_template")
        if given is None:
            path = folder / "chat_template.json"
            given = json_object(path).get("chat_template")
        if isinstance(given, list):
            sources |= {
                str(each.get("name")): each.get("template") for each in given if isinstance(each, dict)
            }
        elif given is not None:
            sources["default"] = given
    for name, source in sources.items():
        if name in files and not isinstance(source, str):
            raise CheckpointError(f"{path}: chat_template is {type(source).__name__}, not text")
        if name in files and len(source) > _MOST_CHARS:
            raise CheckpointError(
                f"{path}: the chat template has {len(source):,} characters; at most {_MOST_CHARS:,} are read"
            )
    return sources
