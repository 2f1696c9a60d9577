"""Training examples in the field's formats: messages, ShareGPT, Alpaca, prompt and completion.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}      OpenAI, TRL, mistral-finetune
    {"conversations": [{"from": "human", "value": "..."}, ...]}                  ShareGPT
    {"instruction": "...", "input": "...", "output": "..."}                      Alpaca
    {"instruction": "...", "context": "...", "response": "..."}                  Dolly
    {"question": "...", "answer": "..."}                                         question and answer
    {"prompt": "...", "completion": "..."}                                       texts, or lists of messages

A message may have `weight` 0 (its answer is not learnt) or 1, or `train`, `loss` or `trainable` as true or
false; a `content` of text parts; and `tool_calls` instead of a content. Tools may be a JSON text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.errors import DataError, RequestError
from meshwright.models.chat import ChatTemplate

# The keys of each format, by the key that identifies it.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages", "tools", "chat_template_kwargs"),
    "conversations": ("conversations", "system", "tools"),
    "instruction": ("instruction", "input", "context", "output", "response", "system", "history"),
    "question": ("question", "answer"),
    "prompt": ("prompt", "completion", "tools"),
}
# Keys that change the text in other programs.
_REFUSED = (
    "functions", "function_call", "documents", "image", "images", "audio", "audios", "videos", "chosen",
    "rejected", "weight", "weights", "mask", "kto_tag",
)  # fmt: skip
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
          "model": "assistant", "assistant": "assistant", "function_call": "assistant", "system": "system",
          "tool": "tool", "observation": "tool", "function_response": "tool"}  # fmt: skip
# Keys of a message for whether its answer is learnt.
_LEARNT = ("weight", "train", "loss", "trainable")
# Keys of a message that add to its text. A template that does not know them would leave that text out.
_WRITTEN = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "prefix")
Spans = tuple[tuple[int, int], ...]


def format_of(record: Mapping[str, Any]) -> str | None:
    """The identifying key of a record's format; None if it is not one of FORMATS.

    A question next to a text is part of that text.
    """
    return next(
        (key for key in FORMATS if key in record and not (key == "question" and "text" in record)), None
    )


def unread_keys(record: Mapping[str, Any]) -> list[str]:
    """The keys that neither its format nor a plain text reads."""
    read = FORMATS.get(format_of(record) or "", ("text",))
    return [key for key in record if key not in read]


def training_text(record: Mapping[str, Any], where: str, chat: ChatTemplate) -> tuple[str, Spans]:
    """The text of a record of one of FORMATS, and the spans of the answers to learn.

    where: names the record in errors. Raises DataError for what cannot be read, or would change the text
    and is not read.
    """
    # A weight or a mask of 1, and a key without a value, change nothing.
    if refused := next((key for key in _REFUSED if key in record and record[key] not in (None, 1)), None):
        raise DataError(f"{where}: has {refused!r}, which is not read; leave it out")
    match format_of(record):
        case "messages":
            options = record.get("chat_template_kwargs") or {}
            return _conversation(record["messages"], record.get("tools"), where, chat, options)
        case "conversations":
            return _conversation(_of_sharegpt(record, where), record.get("tools"), where, chat, {})
        case "instruction":
            return _conversation(_of_alpaca(record, where), None, where, chat, {})
        case "question":
            asked = {"instruction": record["question"], "output": record.get("answer")}
            if not isinstance(asked["output"], str) or not asked["output"]:
                raise DataError(f"{where}: 'question' needs an 'answer', and both are strings")
            return _conversation(_of_alpaca(asked, where), None, where, chat, {})
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
        value = turn.get("value")
        content = _tool_calls(value, where) if who == "function_call" else {"content": value}
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        messages.append({"role": _ROLES[who], **content, **others})
    return messages


def _tool_calls(value: object, where: str) -> dict[str, Any]:
    """The content and `tool_calls` of a message, from the JSON text of one or several calls."""
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        calls = None
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(f"{where}: a 'function_call' is not JSON with a 'name' and 'arguments'")
    return {"content": None, "tool_calls": [{"type": "function", "function": call} for call in calls]}


def _of_alpaca(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    system, instruction, given, output = (
        next((record[key] for key in keys if record.get(key)), "")
        for keys in (("system",), ("instruction",), ("input", "context"), ("output", "response"))
    )
    if not all(isinstance(text, str) for text in (system, instruction, given, output)) or not output:
        raise DataError(f"{where}: 'instruction' needs an 'output' or a 'response', and both are strings")
    asked = "\n\n".join(filter(None, (instruction, given)))
    messages = [{"role": "system", "content": system}] if system else []
    history = record.get("history") or []
    if not isinstance(history, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in history
    ):
        raise DataError(f"{where}: 'history' must be a list of [question, answer]")
    turns = [*history, (asked, output)]
    return messages + [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _completed(record: Mapping[str, Any], where: str, chat: ChatTemplate) -> tuple[str, Spans]:
    prompt, completion = record["prompt"], record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        # Only the completion is learnt.
        asked = [{**one, "weight": 0} if _is_answer(one) else one for one in prompt]
        return _conversation([*asked, *completion], record.get("tools"), where, chat, {})
    if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
        answer = next((key for key in ("response", "answer", "output", "chosen") if key in record), None)
        hint = f"; rename {answer!r} to 'completion'" if answer else ""
        raise DataError(
            f"{where}: 'prompt' needs a 'completion'; both are strings, or lists of messages{hint}"
        )
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
        raise DataError(f"{where}: 'messages' must be a list of objects with a 'role' and a 'content' string")
    read = [_message(message, f"{where}: message {number}") for number, message in enumerate(messages, 1)]
    for number, message in enumerate(read, 1):
        if unread := next((key for key in _WRITTEN if message.get(key) and not chat.reads(key)), None):
            raise DataError(
                f"{where}: message {number} has {unread!r}, which the chat template does not write; "
                "put its text into the content, or give the tokenizer a chat template with it"
            )
    if isinstance(tools, str):
        tools = _parsed_tools(tools, where)
    if tools and not chat.reads_tools:
        raise DataError(f"{where}: has 'tools', which the chat template does not read; leave them out")
    given = {**options, **({"tools": tools} if tools else {})}
    learnt = [_learnt(message, where) for message in messages]
    try:
        spans = _answer_spans(read, learnt, where, chat, given)
        text = chat.render(read, add_generation_prompt=False, **given)
    except RequestError as error:
        raise DataError(f"{where}: {error}") from None
    if not spans:
        some = "with a weight of 1 " if any(message["role"] == "assistant" for message in read) else ""
        raise DataError(f"{where}: has no message of the role 'assistant' {some}to learn from")
    return text, tuple(spans)


def _answer_spans(
    messages: Sequence[dict[str, Any]],
    learnt: Sequence[bool],
    where: str,
    chat: ChatTemplate,
    given: Mapping[str, Any],
) -> list[tuple[int, int]]:
    """The spans of the assistant's messages that are learnt, in the text of the conversation.

    given: the template's other values. Raises DataError for an answer that the template leaves out, or writes
    differently if more messages follow.
    """
    text = chat.render(messages, add_generation_prompt=False, **given)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = chat.render(messages[:number], **given)
        answered = chat.render(messages[: number + 1], add_generation_prompt=False, **given)
        if not (answered.startswith(prompt) and text.startswith(answered)):
            raise DataError(
                f"{where}: the chat template writes message {number + 1} differently if more "
                "follow, so the loss cannot mask it; give each answer a conversation of its own"
            )
        if message["content"].strip() and not text[len(prompt) : len(answered)].strip():
            raise DataError(
                f"{where}: the chat template writes nothing of message {number + 1}, an answer, so nothing "
                "is learnt; give the tokenizer a chat template that writes answers"
            )
        if learnt[number]:
            spans.append((len(prompt), len(answered)))
    return spans


def _parsed_tools(text: str, where: str) -> object:
    """The tools of a JSON text, as in files for LLaMA-Factory."""
    try:
        return json.loads(text or "[]")
    except ValueError as error:
        raise DataError(f"{where}: 'tools' is a text that is not JSON ({error})") from None


def _message(message: object, where: str) -> dict[str, Any]:
    """A message as templates read it: with a text, and without its weight."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f"{where} is not an object with a 'role' and a 'content' string")
    content = message.get("content")
    if isinstance(content, list):
        content = _text_of(content, where)
    elif content is None and message.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        kind = "null" if content is None else type(content).__name__
        raise DataError(f"{where} has a 'content' of {kind}; give a string, text parts, or 'tool_calls'")
    return {**{key: value for key, value in message.items() if key not in _LEARNT}, "content": content}


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
    """Whether the loss counts a message: unless one of its keys is 0 or false."""
    for key in _LEARNT:
        if message.get(key) not in (0, 1, None):
            raise DataError(f"{where}: a message has {key} = {message[key]!r}; fits: 0, 1")
    return all(message.get(key) != 0 for key in _LEARNT)
