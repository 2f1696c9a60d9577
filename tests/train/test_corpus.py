"""Corpora of every kind of source, their split and packing, and batches by global example index."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from meshwright.errors import DataError
from meshwright.train import documents
from meshwright.train.bpe import END_OF_TEXT, train_tokenizer
from meshwright.train.corpus import Batches, Corpus, prepare_corpus, unigram_entropy
from meshwright.train.documents import Document, divide, document_pieces, read_documents
from meshwright.train.row_codes import BEGINS, ids, is_counted

WORDS = "the mesh has two axes and the weights lie on both\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty short texts in two folders, and what is not to be read: a picture, hidden and cached files."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("a", "b", ".git", "__pycache__"):
        (folder / name).mkdir()
    for number in range(40):
        (folder / "ba"[number % 2] / f"{number:02}.txt").write_text(f"text {number}: é {WORDS}" * 5)
    (folder / "picture.png").write_bytes(b"\x89PNG\x00\xff")
    (folder / ".git" / "config").write_text("hidden")
    (folder / ".hidden").write_text("hidden")
    (folder / "__pycache__" / "a.py").write_text("cached")
    return folder


@pytest.fixture(scope="module")
def corpus(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return prepare_corpus(str(folder), tmp_path_factory.mktemp("data"), vocab_size=300, seq_len=12)


def parts(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, validation) pieces."""
    division = divide(lambda: documents, sum(len(document.text) for document in documents))
    pieces = list(division.pieces(documents))
    return [piece for piece, held in pieces if not held], [piece for piece, held in pieces if held]


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_folder_is_read_in_order_without_what_is_no_text(folder):
    names = [document.name for document in read_documents(str(folder))]
    assert names == sorted(names)
    assert len(names) == 40
    assert names[0] == "a/01.txt"


def test_rows_decode_to_the_documents_of_the_split(folder, corpus):
    training, validation = parts(list(read_documents(str(folder))))
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_path))
    for split, its_documents in (("train", training), ("validation", validation)):
        text = tokenizer.decode(corpus.rows(split).ravel().tolist(), skip_special_tokens=False)
        whole = "".join(document.text + END_OF_TEXT for document in its_documents)
        assert whole.startswith(text.rstrip("\ufffd"))
        assert len(whole) - len(text) < 12 * 20  # what does not fill the last row


def test_corpus_counts_what_it_holds(corpus):
    train, validation = corpus.rows("train"), corpus.rows("validation")
    assert train.dtype == np.uint16
    assert train.shape == (corpus.num_train_tokens // 13, 13)
    assert validation.shape == (corpus.num_validation_tokens // 13, 13)
    assert (corpus.num_train_documents + corpus.num_validation_documents, corpus.vocab_size) == (40, 300)
    assert np.sum(train == corpus.end_of_text_id) <= corpus.num_train_documents
    assert 0 < corpus.unigram_entropy < np.log(300)


def test_a_second_call_reuses_and_a_changed_text_does_not(folder, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(WORDS * 200)
    first = prepare_corpus(str(source), tmp_path / "data", vocab_size=270, seq_len=8)
    written = (tmp_path / "data" / "train.npy").stat().st_mtime_ns
    again = prepare_corpus(str(source), tmp_path / "data", vocab_size=270, seq_len=8)
    assert again == first
    assert (tmp_path / "data" / "train.npy").stat().st_mtime_ns == written
    source.write_text(WORDS * 201)
    changed = prepare_corpus(str(source), tmp_path / "data", vocab_size=270, seq_len=8)
    assert changed.fingerprint != first.fingerprint
    longer = prepare_corpus(str(source), tmp_path / "data", vocab_size=270, seq_len=16)
    assert longer.rows("train").shape[1] == 17
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "text.txt"]


def test_two_preparations_write_the_same_bytes(folder, tmp_path):
    for name in ("one", "two"):
        prepare_corpus(str(folder), tmp_path / name, vocab_size=300, seq_len=12)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_a_given_tokenizer_is_used(corpus, tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(f"other words, and {END_OF_TEXT} spelt out\n" * 200)
    other = prepare_corpus(
        str(source), tmp_path / "data", vocab_size=300, seq_len=8, tokenizer=corpus.tokenizer_path
    )
    assert other.tokenizer_path.read_bytes() == corpus.tokenizer_path.read_bytes()
    # The spelt-out token is text: only the ends of the pieces of the split are ends.
    num_ends = sum(
        int(np.sum(other.rows(split) == other.end_of_text_id)) for split in ("train", "validation")
    )
    assert num_ends <= other.num_train_documents + other.num_validation_documents < 50


def test_stdlib_is_the_interpreters_own_source():
    documents = {document.name: document.text for document in read_documents("stdlib")}
    assert "argparse.py" in documents and "json/decoder.py" in documents
    assert documents["argparse.py"] == Path(sys.modules["argparse"].__file__ or "").read_text("utf-8")
    assert not [name for name in documents if "site-packages" in name or name.startswith("test/")]
    assert 3e6 < sum(map(len, documents.values())) < 3e7


def test_stories_are_whole_sentences_and_the_same_each_time():
    documents = [document.text for document in read_documents("stories")]
    assert documents == [document.text for document in read_documents("stories")]
    assert len(set(documents)) > 0.99 * len(documents) and 3e6 < sum(map(len, documents)) < 5e6
    lines = [line for text in documents for line in text.splitlines()]
    assert all(line[0].isupper() or line[0] == '"' for line in lines)
    assert all(line.endswith((".", '"')) for line in lines) and not any("{" in line for line in lines)


def test_jsonl_documents_are_its_lines(tmp_path):
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "one", "id": 1}\n\n{"text": "two"}\n{"text": " "}\n')
    assert list(read_documents(str(source))) == [
        Document("texts.jsonl:1", "one"),
        Document("texts.jsonl:3", "two"),
    ]


def test_a_json_list_and_a_byte_order_mark_are_read(tmp_path):
    listed, lines = tmp_path / "texts.json", tmp_path / "texts.jsonl"
    listed.write_text('[{"text": "one"}, {"text": "two"}]')
    lines.write_text('\ufeff{"text": "one"}\r\n{"text": "two"}\r\n', newline="")
    for source in (listed, lines):
        assert [document.text for document in read_documents(str(source))] == ["one", "two"]
    listed.write_text('[{"text": "one"}, {"body": "two"}]')
    with pytest.raises(DataError, match=r"texts.json record 2: has no 'text' string"):
        list(read_documents(str(listed)))


def test_a_short_evaluation_set_is_named(tmp_path):
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("some words of a text\n" * 500)
    short.write_text("few\n")
    with pytest.raises(DataError, match=r"short.txt: its eval.x split has"):
        prepare_corpus(
            str(long), tmp_path / "data", vocab_size=300, seq_len=64, evaluations={"x": str(short)}
        )


def test_cut_conversations_are_counted_once(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 80}]
    chats = tmp_path / "chats.jsonl"
    chats.write_text(f"{json.dumps({'messages': turns})}\n" * 40)
    data = tmp_path / "data"
    with pytest.warns(UserWarning, match="80 conversations are longer than a row") as warned:
        prepare_corpus(str(chats), data, vocab_size=300, seq_len=16, evaluations={"x": str(chats)})
    assert len(warned) == 1


def chats_file(path: Path, questions: list[str]) -> str:
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": asked}, answer]} for asked in questions]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def test_conversations_without_a_token_to_learn_are_left_out(tmp_path):
    long = chats_file(tmp_path / "long.jsonl", ["word " * 80] * 40)
    with pytest.raises(DataError, match=r"answers of all \d+ conversations .* begin behind a row of T"):
        prepare_corpus(long, tmp_path / "data", vocab_size=300, seq_len=16)
    mixed = chats_file(tmp_path / "mixed.jsonl", ["word " * 80, "Hi"] * 40)
    with pytest.warns(UserWarning, match="40 conversations are left out: their answers begin behind a row"):
        corpus = prepare_corpus(mixed, tmp_path / "data", vocab_size=300, seq_len=16)
    rows = np.load(corpus.directory / "train.npy")
    assert is_counted(rows[:, 1:]).any(axis=1).all()  # each row has something to learn


def test_one_short_conversation_is_an_evaluation_set(tmp_path):
    chats = chats_file(tmp_path / "chats.jsonl", ["Hi"] * 40)
    short = chats_file(tmp_path / "short.jsonl", ["Hi"])
    prepare_corpus(chats, tmp_path / "data", vocab_size=300, seq_len=64, evaluations={"x": short})
    assert np.load(tmp_path / "data" / "eval.x.npy").shape == (1, 65)


def test_words_without_end_are_cut_for_the_tokenizer():
    word = "".join(chr(97 + n * 7919 % 26) for n in range(300_000))
    started = time.process_time()
    assert train_tokenizer([f"a {word} b", " " * 300_000], 300).get_vocab_size() <= 300
    assert time.process_time() - started < 10  # uncut: a minute, quadratic in the length


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": ',
            "is not JSON (Expecting value: line 2 column 1 (char 10)); give an object with a 'text' field",
        ),
        (
            '{"body": "x"}',
            "has no 'text' string; give an object with a 'text' or 'messages' field, or rename one of 'body'",
        ),
        ("[1]", "has no 'text' string; give an object with a 'text' or 'messages' field"),
    ],
)
def test_a_bad_jsonl_line_is_named(tmp_path, line, message):
    source = tmp_path / "texts.jsonl"
    source.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(DataError) as error:
        list(read_documents(str(source)))
    assert str(error.value) == f"corpus {source} line 2: {message}"


def test_parquet_is_read_or_the_cure_is_named(tmp_path, monkeypatch):
    source = tmp_path / "texts.parquet"
    source.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError) as error:
        list(read_documents(str(source)))
    assert str(error.value) == f"corpus {source}: parquet needs pyarrow; pip install 'meshwright[parquet]'"


def test_parquet_documents_are_its_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    source = tmp_path / "texts.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"]}), source)
    assert list(read_documents(str(source))) == [
        Document("texts.parquet:0", "one"),
        Document("texts.parquet:2", "two"),
    ]
    parquet.write_table(pyarrow.table({"body": ["one"]}), source)
    with pytest.raises(DataError, match=r"texts.parquet: no column 'text' can be read \("):
        list(read_documents(str(source)))


def test_sources_without_text_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "x.bin").write_bytes(b"\x00\xff")
    (tmp_path / "blank.txt").write_text(" \n")
    kinds = "give 'stdlib', 'stories', a folder, or a .txt, .py, .jsonl or .parquet file"
    expected = {
        "absent": f"no such file or folder; {kinds}",
        "empty": "the folder is empty; put UTF-8 text, .jsonl or .parquet files in it",
        "binary": "none of its 1 files is text; put UTF-8 text, .jsonl or .parquet in it",
        "binary/x.bin": f"is not UTF-8 text; {kinds}",
        "blank.txt": f"holds no text; {kinds}",
    }
    for name, message in expected.items():
        with pytest.raises(DataError) as error:
            prepare_corpus(str(tmp_path / name), tmp_path / "data", vocab_size=300, seq_len=8)
        assert str(error.value) == f"corpus {tmp_path / name}: {message}"
    assert not (tmp_path / "data").exists()


def test_text_shorter_than_a_row_is_refused_and_nothing_is_left(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(WORDS * 3)
    with pytest.raises(DataError) as error:
        prepare_corpus(str(source), tmp_path / "data", vocab_size=270, seq_len=1000)
    assert str(error.value).startswith(f"corpus {source}: its train split has ")
    assert str(error.value).endswith(
        " tokens, less than one row of T + 1 = 1,001; give more text or a shorter sequence"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(("text", "last"), [("short", ("reading", 0.0)), ("aa " * 30, ("packing", 0.0))])
def test_an_evaluation_set_without_a_row_is_named_before_the_data_is_packed(tmp_path, text, last):
    source, other, seen = tmp_path / "text.txt", tmp_path / "other.txt", []
    source.write_text("aa bb cc " * 4000)
    other.write_text(text)
    with pytest.raises(DataError, match=rf"corpus {other}: its eval.other split has"):
        prepare_corpus(
            str(source),
            tmp_path / "data",
            vocab_size=300,
            seq_len=64,
            evaluations={"other": str(other)},
            progress=lambda what, fraction: seen.append((what, fraction)),
        )
    assert seen[-1] == last


def test_a_tokenizer_larger_than_the_model_is_refused(corpus, folder, tmp_path):
    with pytest.raises(DataError) as error:
        prepare_corpus(
            str(folder), tmp_path / "data", vocab_size=290, seq_len=8, tokenizer=corpus.tokenizer_path
        )
    assert str(error.value) == (
        f"tokenizer {corpus.tokenizer_path}: 300 ids exceed the model's vocabulary V = 290; fits: V >= 300"
    )
    with pytest.raises(DataError, match=r"a byte-level BPE needs V >= 257 ids .*, the model has V = 256"):
        prepare_corpus(str(folder), tmp_path / "data", vocab_size=256, seq_len=8)


def test_what_is_no_tokenizer_is_refused(folder, corpus, tmp_path):
    broken = tmp_path / "tokenizer.json"

    def prepare() -> None:
        prepare_corpus(str(folder), tmp_path / "data", vocab_size=300, seq_len=8, tokenizer=broken)

    with pytest.raises(DataError, match=r"tokenizer.json: no such file; give a tokenizer.json"):
        prepare()
    broken.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer: "):
        prepare()
    broken.write_text(corpus.tokenizer_path.read_text().replace(END_OF_TEXT, "<|other|>"))
    with pytest.raises(DataError, match=r"has no token that ends a document; known: <\|endoftext\|>, "):
        prepare()


def test_a_folder_that_is_no_corpus_is_not_replaced(folder, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError) as error:
        prepare_corpus(str(folder), tmp_path, vocab_size=300, seq_len=12)
    assert str(error.value) == f"corpus {tmp_path}: exists and is not a corpus; name a new or an empty folder"
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "corpus.json",
            None,
            "corpus.json is missing; delete that folder, and it is prepared again from its text",
        ),
        (
            "train.npy",
            None,
            "train.npy is missing; delete that folder, and it is prepared again from its text",
        ),
        ("corpus.json", b"{", "is damaged ("),
        ("corpus.json", b"{}", "is damaged ("),
        ("validation.npy", b"\x93NUMPY", "is damaged ("),
    ],
)
def test_a_damaged_corpus_is_refused_and_made_again(folder, tmp_path, name, content, message):
    directory = tmp_path / "data"
    whole = prepare_corpus(str(folder), directory, vocab_size=300, seq_len=12)
    if content is None:
        (directory / name).unlink()
    else:
        (directory / name).write_bytes(content)
    with pytest.raises(DataError) as error:
        Corpus.load(directory)
    assert str(error.value).startswith(f"corpus {directory}: {message}")
    if (directory / "corpus.json").exists():
        assert prepare_corpus(str(folder), directory, vocab_size=300, seq_len=12) == whole


def test_rows_of_another_corpus_are_noticed(corpus, tmp_path):
    for name, content in files(corpus.directory).items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "train.npy", corpus.rows("train")[:-1])
    with pytest.raises(DataError, match=r"its rows do not match corpus.json; delete that folder"):
        Corpus.load(tmp_path)


def test_unigram_entropy_worked_by_hand():
    """Counts 3, 1, 0 of V = 3: p = 4/7, 2/7, 1/7. Validation predicts tokens 0 and 2."""
    train, validation = np.array([[0, 0], [1, 0]]), np.array([[1, 0], [0, 2]])
    expected = -(np.log(4 / 7) + np.log(1 / 7)) / 2
    assert unigram_entropy([train], validation, 3) == pytest.approx(expected)


@given(
    st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=60), min_size=2, max_size=40),
    st.randoms(),
)
def test_the_split_parts_the_text_the_same_way_in_any_order(texts, random):
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    training, validation = parts(documents)
    total = sum(map(len, texts))
    assert sum(len(document.text) for document in training + validation) == total
    taken = sum(len(document.text) for document in validation)
    assert max(1, int(total * 0.05)) <= taken <= max(1, int(total * 0.1))
    random.shuffle(documents)
    assert {document.name for document in parts(documents)[1]} == {d.name for d in validation}


@given(
    start=st.integers(0, 2000),
    seed=st.integers(0, 5),
    batch=st.integers(1, 8),
    data=st.data(),
)
def test_a_process_reads_its_own_rows_of_a_batch(corpus, start, seed, batch, data):
    whole = Batches(corpus, batch_sequences=batch, seed=seed)
    rows = sorted(data.draw(st.sets(st.integers(0, batch - 1), min_size=1)))
    part = Batches(corpus, batch_sequences=batch, seed=seed, rows=rows)
    for example in range(start, start + 3 * batch, batch):
        expected = whole.at(example)
        assert (expected.shape, expected.dtype) == ((batch, 13), np.int32)
        np.testing.assert_array_equal(part.at(example), expected[rows])


@given(start=st.integers(0, 500), batch=st.integers(1, 9), other=st.integers(1, 9))
def test_the_position_is_an_example_whatever_the_batch(corpus, start, batch, other):
    first = Batches(corpus, batch_sequences=batch, seed=1)
    rows = np.concatenate([first.at(start + batch * number) for number in range(other)])
    second = Batches(corpus, batch_sequences=other, seed=1)
    again = np.concatenate([second.at(start + other * number) for number in range(batch)])
    np.testing.assert_array_equal(again, rows)


def test_an_epoch_reads_every_row_once_and_the_next_in_another_order(corpus):
    rows = corpus.rows("train")
    stream, count = Batches(corpus, batch_sequences=1, seed=3), len(rows)
    epochs = [[stream.at(epoch * count + row)[0].tobytes() for row in range(count)] for epoch in range(2)]
    expected = sorted(row.astype(np.int32).tobytes() for row in rows)
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_a_bit_that_changed_in_the_rows_is_noticed(folder, tmp_path):
    """An id of the vocabulary in another's place, or one beyond it, which JAX would clip in silence."""
    made = prepare_corpus(str(folder), tmp_path / "data", vocab_size=300, seq_len=12)
    path = made.directory / "validation.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        Corpus.load(made.directory)
    assert str(error.value) == (
        f"corpus {made.directory}: validation.npy does not match its checksum;"
        " delete that folder, and it is prepared again from its text"
    )


@given(text=st.text(st.sampled_from("ab\r\n\u00e9"), max_size=90))
def test_a_long_file_is_read_in_the_pieces_that_it_would_be_cut_into(text):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_LONGEST", 16)
        path = Path(folder, "long.txt")
        path.write_bytes(text.encode())
        expected = [piece for piece in document_pieces(Document("long.txt", text), 16) if piece.text.strip()]
        if expected:
            assert list(read_documents(str(path))) == expected


def test_bad_lines_and_files_are_left_out_by_name(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": \n{"text": "two"}\n')
    (tmp_path / "b.txt").write_text("three")
    with pytest.warns(UserWarning, match=r"a\.jsonl line 2: is not JSON .* it is left out"):
        found = list(read_documents(str(tmp_path), "skip"))
    assert [document.text for document in found] == ["one", "two", "three"]
    with pytest.raises(DataError, match=r"a\.jsonl line 2: is not JSON"):
        list(read_documents(str(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize("num_lines", [300_000, 5_500_000])
def test_a_corpus_need_not_fit_in_memory(num_lines: int, tmp_path: Path) -> None:
    """30 MB, more than the tokenizer learns from, and 534 MB: either within 500 MB, the process and all."""
    line = "the weights of every layer lie on two axes of the mesh, and their gradients on both of them"
    with (tmp_path / "text.txt").open("w") as file:
        file.writelines(f"{number} {line}\n" for number in range(num_lines))
    # Its maxrss would begin with that of the process that starts it.
    program = (
        "import re, sys; from pathlib import Path; from meshwright.train.corpus import prepare_corpus;"
        "c = prepare_corpus(sys.argv[1], Path(sys.argv[2]), vocab_size=512, seq_len=256);"
        "status = Path('/proc/self/status').read_text();"
        "print(c.num_bytes, int(re.search(r'VmHWM:\\s+(\\d+) kB', status)[1]) * 1024)"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "text.txt"), str(tmp_path / "data")]
    threads = os.environ | {"TOKENIZERS_PARALLELISM": "true"}
    out = subprocess.run(arguments, capture_output=True, text=True, check=True, env=threads).stdout
    num_bytes, peak = map(int, out.split())
    assert num_bytes > 97 * num_lines and peak < 500e6, (num_bytes, peak)


def test_a_vocabulary_beyond_sixteen_bits_takes_wider_rows(corpus, folder, tmp_path):
    record = json.loads(corpus.tokenizer_path.read_text())
    vocab = record["model"]["vocab"]
    vocab |= {f"unused{number}": number for number in range(len(vocab), 70_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    wide = prepare_corpus(
        str(folder), tmp_path / "data", vocab_size=70_000, seq_len=12, tokenizer=tmp_path / "tokenizer.json"
    )
    assert wide.rows("train").dtype == np.uint32
    np.testing.assert_array_equal(wide.rows("train"), corpus.rows("train"))


def test_a_mixture_shares_the_examples_by_weight(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("\n".join(f"line {n} of another text" for n in range(400)))
    sources = (f"{folder}:3", f"{tmp_path / 'b.txt'}:1")
    mixed = prepare_corpus(sources, tmp_path / "data", vocab_size=300, seq_len=12)
    assert (mixed.weights, mixed.parts) == ([3.0, 1.0], ["train", "train.1"])
    of_b = {row.tobytes() for row in mixed.rows("train.1").astype(np.int32)}
    stream = Batches(mixed, batch_sequences=8, seed=0)
    from_b = [row.tobytes() in of_b for start in range(0, 400, 8) for row in stream.at(start)]
    assert sum(from_b) == 100
    # Any stretch has its share, so a run that stops early has trained on both.
    assert all(0 < sum(from_b[start : start + 12]) < 6 for start in range(0, 388, 12))
    seen = [row.tobytes() for start in range(0, 400, 8) for row in stream.at(start)]
    assert len({row for row, is_b in zip(seen, from_b, strict=True) if is_b}) == min(100, len(of_b))
    with pytest.raises(DataError, match="its weight 0 is not above 0"):
        prepare_corpus(("a.txt:0", "b.txt"), tmp_path / "other", vocab_size=300, seq_len=12)


def test_documents_are_marked_where_they_begin(folder: Path, tmp_path: Path, corpus: Corpus) -> None:
    masked = prepare_corpus(str(folder), tmp_path / "data", vocab_size=300, seq_len=12, mask_documents=True)
    assert masked.masked and not corpus.masked and masked.fingerprint != corpus.fingerprint
    for split in ("train", "validation"):
        tokens = masked.rows(split).ravel()
        np.testing.assert_array_equal(ids(tokens), corpus.rows(split).ravel())
        begins = (tokens & BEGINS) != 0
        np.testing.assert_array_equal(begins[1:], ids(tokens)[:-1] == masked.end_of_text_id)
