"""Training examples in the field's formats: messages, ShareGPT, Alpaca, prompt and completion.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}      OpenAI, TRL, mistral-finetune
    {"conversations": [{"from": "human", "value": "..."}, ...]}                  ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                      Alpaca
    {"prompt": "...", "completion": "..."}                                       texts, or lists of messages

A message may have `weight` 0 (its answer is not learnt) or 1, a `content` of text parts, and `tool_calls`
instead of a content.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import DataError, RequestError
from meshwright.models.chat import ChatTemplate

# The keys of each format, by the key that identifies it.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "tools", "chat_template_kwargs"),
    "conversations": ("conversations", "system", "tools"),
    "instruction": ("instruction", "input", "output", "system"),
    "prompt": ("prompt", "completion", "tools"),
}
# Keys that change the text in other programs.
_REFUSED = ("functions", "function_call", "documents", "images", "audio", "videos", "chosen", "rejected")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
          "tool": "tool", "observation": "tool"}  # fmt: skip
Spans = tuple[tuple[int, int], ...]


def format_of(record: Mapping[str, Any]) -> str | None:
    """The identifying key of a record's format; None if it is not one of FORMATS."""
    return next((key for key in FORMATS if key in record), None)


def unread_keys(record: Mapping[str, Any]) -> list[str]:
    """The keys that neither its format nor a plain text reads."""
    read = FORMATS.get(format_of(record) or "", ("text",))
    return [key for key in record if key not in read]


def example(record: Mapping[str, Any], where: str, chat: ChatTemplate) -> tuple[str, Spans]:
    """The text of a record of one of FORMATS, and the spans of the answers to learn.

    where: names the record in errors. Raises DataError for what cannot be read, or would change the text
    and is not read.
    """
    if refused := next((key for key in _REFUSED if key in record), None):
        raise DataError(f"{where}: has {refused!r}, which is not read; leave it out")
    match format_of(record):
        case "messages":
            options = record.get("chat_template_kwargs") or {}
            return _conversation(record["messages"], record.get("tools"), where, chat, options)
        case "conversations":
            return _conversation(_of_sharegpt(record, where), record.get("tools"), where, chat, {})
        case "instruction":
            return _conversation(_of_alpaca(record, where), None, where, chat, {})
        case _:
            return _completed(record, where, chat)


def _of_sharegpt(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    turns = record["conversations"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"{where}: 'conversations' must be a list of objects with 'from' and 'value'")
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for turn in turns:
        if {"role", "content"} <= turn.keys():
            messages.append(turn)
            continue
        who = turn.get("from")
        if who not in _ROLES:
            raise DataError(f"{where}: 'from' is {who!r}; fits: {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[who], "content": turn.get("value"), **_weight_of(turn)})
    return messages


def _weight_of(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {"weight": turn["weight"]} if "weight" in turn else {}


def _of_alpaca(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    system, instruction, given, output = (
        record.get(key) or "" for key in ("system", "instruction", "input", "output")
    )
    if not all(isinstance(text, str) for text in (system, instruction, given, output)) or not output:
        raise DataError(f"{where}: 'instruction' needs an 'output', and both are strings")
    asked = "\n\n".join(filter(None, (instruction, given)))
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": asked}, {"role": "assistant", "content": output}]


def _completed(record: Mapping[str, Any], where: str, chat: ChatTemplate) -> tuple[str, Spans]:
    prompt, completion = record["prompt"], record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        # Only the completion is learnt.
        asked = [{**one, "weight": 0} if _is_answer(one) else one for one in prompt]
        return _conversation([*asked, *completion], record.get("tools"), where, chat, {})
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        raise DataError(f"{where}: 'prompt' needs a 'completion'; both are strings, or lists of messages")
    return prompt + completion, ((len(prompt), len(prompt) + len(completion)),)


def _is_answer(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _conversation(
    messages: object, tools: object, where: str, chat: ChatTemplate, options: Mapping[str, Any]
) -> tuple[str, Spans]:
    """The conversation in the template's format, with the spans of its assistant's answers.

    An answer is the text that its message adds to the prompt before it.
    """
    if not isinstance(messages, list):
        raise _no_messages(where)
    read = [_message(message, where) for message in messages]
    if tools and not chat.reads_tools:
        raise DataError(f"{where}: has 'tools', which the chat template does not read; leave them out")
    given = {**options, **({"tools": tools} if tools else {})}
    spans: list[tuple[int, int]] = []
    learnt = [_learnt(message, where) for message in messages]
    try:
        text = chat.render(read, add_generation_prompt=False, **given)
        for number in (number for number, message in enumerate(read) if message["role"] == "assistant"):
            prompt = chat.render(read[:number], **given)
            answered = chat.render(read[: number + 1], add_generation_prompt=False, **given)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise DataError(
                    f"{where}: the chat template writes message {number + 1} differently if more "
                    "follow, so the loss cannot mask it; give each answer a conversation of its own"
                )
            if learnt[number]:
                spans.append((len(prompt), len(answered)))
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None
    if not spans:
        some = "with a weight of 1 " if any(message["role"] == "assistant" for message in read) else ""
        raise DataError(f"{where}: has no message of the role 'assistant' {some}to learn from")
    return text, tuple(spans)


def _no_messages(where: str) -> DataError:
    return DataError(f"{where}: 'messages' must be a list of objects with a 'role' and a 'content' string")


def _message(message: object, where: str) -> dict[str, Any]:
    """A message as templates read it: with a text, and without its weight."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _no_messages(where)
    content = message.get("content")
    if isinstance(content, list):
        content = _text_of(content, where)
    elif content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise _no_messages(where)
    return {**{key: value for key, value in message.items() if key != "weight"}, "content": content}


def _text_of(parts: Sequence[object], where: str) -> str:
    """The texts of a content's parts, joined."""
    texts = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise DataError(f"{where}: a part of a content is {kind!r}; fits: text")
        texts.append(part["text"])
    return "".join(texts)


def _learnt(message: Mapping[str, Any], where: str) -> bool:
    """Whether the loss counts a message: its weight, by default 1."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}: a message has weight = {weight!r}; fits: 0, 1")
    return bool(weight)
