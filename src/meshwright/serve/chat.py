"""The text of a conversation, as the model was trained to read it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.errors import CheckpointError, RequestError

PLAIN_TEMPLATE = """\
{% for message in messages %}
{{ message.role }}: {{ message.content }}

{% endfor %}
assistant:"""
"""For checkpoints without a template: `role: content` paragraphs, and `assistant:` to continue."""


class ChatTemplate:
    """A Jinja template over messages, in the dialect of Hugging Face tokenizers.

    special_tokens: `bos_token`, `eos_token`, ... as the template names them.
    Raises CheckpointError if the template does not parse.
    """

    def __init__(self, source: str = PLAIN_TEMPLATE, special_tokens: Mapping[str, str] | None = None) -> None:
        # Sandboxed: the template comes with a checkpoint, and a checkpoint is data.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.source, self._special_tokens = source, dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the checkpoint's chat template does not parse: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **context: Any) -> str:
        """The prompt that asks for the next assistant message; RequestError if the template refuses.

        context: further names that the template may read, such as tools.
        """
        names = {"add_generation_prompt": True} | self._special_tokens | context
        try:
            return self._template.render(messages=messages, **names)
        except (TemplateError, TypeError, ValueError, AttributeError) as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error

    @property
    def reads_tools(self) -> bool:
        """Whether the template knows of tools."""
        return "tools" in self.source


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a model was not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
