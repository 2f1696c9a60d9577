"""The text of a conversation, in the format that the model was trained on."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import CheckpointError, RequestError
from meshwright.files import parse_json, read_text

# The longest published templates have some 20,000 characters.
_MOST_CHARS = 1_000_000

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}

{% endfor %}
{% if add_generation_prompt %}assistant:{% endif %}"""
"""For checkpoints without a template: `role: content` paragraphs, and `assistant:` to continue."""


class ChatTemplate:
    """A Jinja template over messages, in the dialect of Hugging Face tokenizers.

    special_tokens: `bos_token`, `eos_token`, ... as the template names them.
    """

    def __init__(self, source: str = PLAIN_TEMPLATE, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source, self._special_tokens = source, dict(special_tokens or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self._special_tokens)

    @cached_property
    def _template(self) -> Template:
        # Sandboxed: the template comes with a checkpoint, and a checkpoint is data.
        # Not optimised: constants such as 9 ** 9 ** 9 would be computed while it is parsed.
        environment = ImmutableSandboxedEnvironment(
            optimized=False,
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            return environment.from_string(self.source)
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            fault = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(f"the checkpoint's chat template does not parse: {fault}") from error

    def check(self) -> None:
        """Raise CheckpointError if the template does not parse."""
        _ = self._template

    def render(self, messages: Sequence[Mapping[str, Any]], **context: Any) -> str:
        """The prompt that asks for the next assistant message; RequestError if the template refuses.

        context: further names that the template may read, such as tools. Raises CheckpointError if the
        template does not parse.
        """
        names = {"add_generation_prompt": True} | self._special_tokens | context
        try:
            return self._template.render(messages=messages, **names)
        except CheckpointError:
            raise
        except Exception as error:  # a template can raise any: it divides by 0, indexes, recurses
            fault = " ".join(str(error).split())[:300] or type(error).__name__
            raise RequestError(
                f"the chat template refuses the messages: {fault}", param="messages"
            ) from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template knows of tools."""
        return "tools" in self.source


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a model was not trained on. Arguments as in transformers.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, with which templates mark answers: what is within."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def load_chat_template(folder: Path) -> ChatTemplate:
    """The template of a checkpoint in Hugging Face format, PLAIN_TEMPLATE if it has none.

    Reads chat_template.jinja and tokenizer_config.json. Raises CheckpointError if they cannot be read.
    """
    config = json_object(folder / "tokenizer_config.json")
    return ChatTemplate(_template(folder, config), special_tokens(config))


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


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        template = read_text(path, CheckpointError)
    else:
        path, template = folder / "tokenizer_config.json", config.get("chat_template")
        if isinstance(template, list):  # several by name
            named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = named[-1].get("template") if named else None
        if template is None:
            template = PLAIN_TEMPLATE
        if not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template is {type(template).__name__}, not text")
    if len(template) > _MOST_CHARS:
        raise CheckpointError(
            f"{path}: the chat template has {len(template):,} characters; at most {_MOST_CHARS:,} are read"
        )
    return template
