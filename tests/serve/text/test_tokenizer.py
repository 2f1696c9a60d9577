"""Reading a checkpoint's tokenizer, end tokens and chat template."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from tests.serve.mock import EOS, byte_tokenizer

from meshwright.errors import CheckpointError, RequestError
from meshwright.models.chat import ChatTemplate, load_chat_template
from meshwright.serve.text.tokenizer import load_tokenizer

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path):
    byte_tokenizer().tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, content):
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_a_folder_with_nothing_but_a_tokenizer(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("naïve")) == "naïve"
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.decode(tokenizer.encode_chat(HELLO)) == "system: Be brief.\n\nuser: hi\n\nassistant:"
    with pytest.raises(RequestError, match=r"^the prompt is empty; send at least one token$"):
        tokenizer.encode("")


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {"eos_token_id": [8, 9]}}, {8, 9}),
        ({"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "<eos>"}}, {EOS}),
        ({"tokenizer_config.json": {"eos_token": {"content": "<eos>", "lstrip": False}}}, {EOS}),
        ({"tokenizer_config.json": {"eos_token": "<unknown>"}}, set()),
    ],
)
def test_end_tokens_are_found_where_checkpoints_write_them(folder, files, eos_ids):
    for name, content in files.items():
        write(folder, name, content)
    assert load_tokenizer(folder).eos_ids == eos_ids


def test_an_empty_prompt_starts_from_bos_or_else_from_the_end_of_a_text(folder):
    write(folder, "config.json", {"eos_token_id": EOS})
    assert load_tokenizer(folder).encode("") == (EOS,)
    write(folder, "tokenizer_config.json", {"bos_token": "a"})
    bos_id = byte_tokenizer().tokenizer.token_to_id("a")
    assert load_tokenizer(folder).encode("") == (bos_id,)


TEMPLATE = "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"bos_token": "[B]", "chat_template": TEMPLATE}),
        (
            "tokenizer_config.json",
            {
                "bos_token": "[B]",
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": TEMPLATE},
                ],
            },
        ),
        ("chat_template.jinja", TEMPLATE.replace("{{ bos_token }}", "[B]")),
    ],
)
def test_the_checkpoints_own_chat_template(folder, name, content):
    write(folder, name, content)
    text = "[B]<system>Be brief.<user>hi<assistant>"
    assert load_tokenizer(folder).chat.render(HELLO) == text


def test_the_dialect_of_hugging_face_templates():
    template = ChatTemplate(
        "{% for m in messages %}\n"
        "  {% if loop.index0 > 0 %}{% break %}{% endif %}\n"
        "{{ m | tojson }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}\n"
        "{% endfor %}"
    )
    rendered = template.render([{"role": "user", "content": "<é>"}] * 2)
    assert rendered.strip() == '{"role": "user", "content": "<é>"}' + f"{datetime.now().year}True"


def test_arguments_of_tojson_and_generation_blocks_are_those_of_transformers():
    template = ChatTemplate(
        "{{ {'b': 1, 'a': 2} | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert template.render([{"role": "assistant", "content": "yes"}]) == '{"a":2,"b":1}yes'


def test_a_tokenizer_saved_with_padding_and_truncation_does_neither(folder):
    """transformers saves the arguments of its last call in tokenizer.json."""
    tokenizer = byte_tokenizer().tokenizer
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("twelve chars")) == 12
    assert len(load_tokenizer(folder).encode("hi")) == 2


def test_a_template_may_refuse_messages():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(
        RequestError, match=r"^the chat template refuses the messages: roles must alternate$"
    ) as error:
        template.render(HELLO)
    assert (error.value.status, error.value.param) == (400, "messages")


def test_a_template_that_does_not_parse_is_named_when_it_is_needed(folder):
    write(folder, "chat_template.jinja", "{% for %}")
    chat = load_tokenizer(folder).chat
    with pytest.raises(CheckpointError, match=r"^the checkpoint's chat template does not parse: "):
        chat.check()


def test_a_template_is_data_and_runs_nothing():
    with pytest.raises(RequestError, match="unsafe"):
        ChatTemplate("{{ messages.__class__.__mro__ }}").render(HELLO)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": None}, r"has no tokenizer\.json; serving text needs one next to the weights$"),
        ({"tokenizer.json": '{"model": '}, r"tokenizer\.json is not a tokenizer: "),
        ({"config.json": "{"}, r"config\.json is not JSON: "),
        ({"tokenizer_config.json": "[]"}, r"tokenizer_config\.json holds list, not a JSON object$"),
    ],
)
def test_a_broken_checkpoint_is_named(folder, files, message):
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            write(folder, name, content)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


def test_templates_for_tools_are_read(tmp_path: Path) -> None:
    folder = tmp_path
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    chat = load_chat_template(folder)
    assert (chat.render(HELLO), chat.render(HELLO, tools=[1]), chat.reads_tools) == ("plain", "[1]", True)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": "a processor\'s"}')
    assert load_chat_template(folder).render(HELLO) == "a processor's"


def test_names_are_as_transformers_passes_them() -> None:
    assert ChatTemplate("{% if tools is not none %}tools{% endif %}").render(HELLO) == ""
    within = "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}[{{ x }}]"
    assert ChatTemplate(within).render(HELLO) == "1[]"
