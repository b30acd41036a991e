"""`distmp data tokenize`: documents of every format, compared with transformers."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distmp import cli
from distmp.commands.tokenize import load_encoder, tokenizer_metadata
from distmp.config import load
from distmp.data.datasets import build_datasets
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import TokenMetadata
from distmp.errors import ConfigError
from distmp.training.run_fingerprint import tokenizer_directory
from tests.torchrun import TINY

END = "<|endoftext|>"
TEXTS = [f"the quick brown fox {i} {END} jumps " * (i % 4) for i in range(60)]


def save_tokenizer(directory: Path, words: str) -> None:
    """Train a small tokenizer and save it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([words] * 50, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(directory)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory, "the quick brown fox jumps")
    return directory


def test_documents_are_not_truncated_or_padded(tokenizer: Path, tmp_path: Path) -> None:
    """A tokenizer may do so, for the model that it was made for."""
    from tokenizers import Tokenizer

    shutil.copytree(tokenizer, tmp_path / "cutting")
    backend = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "cutting" / "tokenizer.json"))
    cutting, encoder = (load_encoder(str(each)) for each in (tmp_path / "cutting", tokenizer))
    assert cutting.encode(TEXTS) == encoder.encode(TEXTS)


@pytest.fixture
def jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    Path("in.jsonl").write_text("".join(lines))
    return "in.jsonl"


def ids_in(directory: Path) -> list[int]:
    metadata = TokenMetadata.read(directory)
    pieces = [np.fromfile(directory / name, metadata.dtype) for name in metadata.files]
    return list(np.concatenate(pieces).tolist())


def tokenize(*arguments: str) -> int:
    return cli.main(["data", "tokenize", *arguments])


def test_local_tokenizer_encodes_documents(
    jsonl: str, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    assert tokenize(jsonl, "--to=out", f"--tokenizer={tokenizer}", "--workers=1") == 0
    reference = AutoTokenizer.from_pretrained(tokenizer, split_special_tokens=True)
    end = reference.eos_token_id
    documents = [reference(text, add_special_tokens=False).input_ids for text in TEXTS if text]
    expected = [token for ids in documents for token in [*ids, end]]
    assert ids_in(Path("out")) == expected
    # The name of the token in a text is text: boundaries of documents stay recoverable.
    assert expected.count(end) == len(documents) == 45
    written = json.loads(Path("out/tokens.json").read_text())
    assert (
        written.items()
        >= {
            "dtype": "uint16",
            "vocabulary_size": len(reference),
            "end_of_text": end,
            "tokenizer": tokenizer.name,
            "documents": 45,
            "tokens": len(expected),
            "files": {"tokens.bin": len(expected)},
        }.items()
    )
    assert len(written["tokenizer_sha256"]) == 64
    # A copy for models that are exported.
    copied = AutoTokenizer.from_pretrained("out/tokenizer")
    assert copied.get_vocab() == reference.get_vocab()
    config = load(["--data.source=tokens", "--data.path=out"])
    assert tokenizer_directory(config) == Path("out/tokenizer")
    assert f"out: 45 documents, {len(expected):,} tokens of uint16" in capsys.readouterr().out
    config = DataConfig(source="tokens", path="out", sequence_length=8, held_out=0)
    data = build_datasets(config)
    assert data.vocabulary_size == len(reference)
    assert data.train[1]["inputs"].tolist() == expected[8:16]


def test_output_is_independent_of_number_of_workers(jsonl: str) -> None:
    variables = os.environ
    for workers in (1, 3):
        assert tokenize(jsonl, f"--to={workers}", "--tokenizer=bytes", f"--workers={workers}") == 0
    assert os.environ is variables
    expected = [byte for text in TEXTS if text for byte in [*text.encode(), 256]]
    assert ids_in(Path("1")) == ids_in(Path("3")) == expected
    assert sorted(path.name for path in Path("1").iterdir()) == ["tokens.bin", "tokens.json"]


@pytest.mark.usefixtures("cwd")
def test_all_input_formats_are_read() -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"body": ["b0", "b1"], "other": [0, 1]})
    rows.to_parquet("in/b.parquet")
    rows.to_json("in/c.jsonl")
    Path("in/a.txt").write_text("a\n\nA")
    Path("in/d.py").write_text("d")
    Path("in/e.json").write_text('[\n{"body": "e0"},\n{"body": "e1"}]')
    Path("in/.hidden").write_text("hidden")
    Path("c.JSONL.gz").write_bytes(gzip.compress(Path("in/c.jsonl").read_bytes()))
    assert tokenize("in", "c.JSONL.gz", "--key=body", "--to=out", "--tokenizer=bytes") == 0
    documents = bytes(255 if byte == 256 else byte for byte in ids_in(Path("out")))
    assert documents.split(b"\xff")[:-1] == [
        *(b"a\n\nA", b"b0", b"b1", b"b0", b"b1", b"d", b"e0", b"e1"),
        *(b"b0", b"b1"),
    ]


@pytest.mark.usefixtures("cwd")
def test_any_column_holds_the_texts() -> None:
    Path("in.jsonl").write_text('{"document": "d", "text": "t"}')
    for key in ("document", "text"):
        arguments = ("in.jsonl", f"--key={key}", f"--to={key}", "--tokenizer=bytes", "--workers=1")
        assert tokenize(*arguments) == 0
        assert ids_in(Path(key)) == [ord(key[0]), 256]


@pytest.mark.usefixtures("cwd")
def test_names_of_files_are_no_patterns() -> None:
    for name in ("a1.txt", "a[1].txt", "*.txt"):
        Path(name).write_text(name)
    assert tokenize("a[1].txt", "*.txt", "--to=out", "--tokenizer=bytes", "--workers=1") == 0
    assert ids_in(Path("out")) == [*b"a[1].txt", 256, *b"*.txt", 256]


def test_run_needs_only_tokenized_directory(jsonl: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize(jsonl, "--to=out", "--tokenizer=bytes", "--workers=1") == 0
    run = ["train", *TINY, "--data.source=tokens", "--data.path=out", "--steps=2"]
    assert cli.main([*run, "--run-dir=run"]) == 0
    assert "held out: " in capsys.readouterr().out
    assert cli.main([*run, "--run-dir=other", "--model.options={vocabulary_size: 100}"]) == 2
    assert (
        "model.options.vocabulary_size = 100: the data has 257 token ids" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: INPUT, --to"),
        (
            ["none", "--tokenizer=bytes"],
            "INPUT = 'none': cannot list none: No such file or directory",
        ),
        (["~nouser/x", "--tokenizer=bytes"], "INPUT = '~nouser/x': cannot list ~nouser/x"),
        (["in.jsonl", "--tokenizer=none"], "--tokenizer = 'none': has no tokenizer.json"),
        (["in.jsonl", "--tokenizer=odd"], "--tokenizer = 'odd': transformers cannot load it"),
        (
            ["in.jsonl", "--tokenizer=bytes", "--key=body"],
            "has no column 'body'; set --key to one of text",
        ),
        (["empty", "--tokenizer=bytes"], "INPUT = 'empty': no document has a token"),
        (["void.jsonl", "--tokenizer=bytes"], "INPUT = 'void.jsonl': is empty; leave it out"),
        (["broken.jsonl", "--tokenizer=bytes"], "INPUT = 'broken.jsonl': cannot be read: "),
        (
            ["numbers.jsonl", "--tokenizer=bytes"],
            "INPUT = 'numbers.jsonl': holds int64 under 'text'; set --key to a key of texts",
        ),
        (
            ["times.jsonl", "--tokenizer=bytes"],
            "INPUT = 'times.jsonl': holds timestamp[s] under 'text'; set --key to a key of texts",
        ),
        (
            ["missing.jsonl", "--tokenizer=bytes"],
            "INPUT = 'missing.jsonl': row 2 has no 'text'; set --key to a key of all rows",
        ),
        (
            ["in.jsonl", "missing.jsonl", "--tokenizer=bytes"],
            "INPUT = 'missing.jsonl': row 2 has no 'text'",
        ),
        (["nothing", "--tokenizer=bytes"], "there is no file in this directory"),
        (["dead", "--tokenizer=bytes"], "dead/b.txt"),
        (["in.jsonl", "--tokenizer=bytes", "--workers=0"], "--workers = 0: use 1 or more"),
        (["latin1.txt", "--tokenizer=bytes"], "can't decode byte"),
        (["a.json", "--tokenizer=bytes"], "INPUT = 'a.json': has no column 'text'"),
    ],
)
def test_errors_are_one_message(
    arguments: list[str], message: str, jsonl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd").mkdir()
    Path("odd/tokenizer.json").write_text("{")
    Path("nothing").mkdir()
    Path("dead").mkdir()
    Path("dead/a.txt").write_text("a")
    Path("dead/b.txt").symlink_to("nowhere")
    Path("empty").mkdir()
    Path("empty/a.txt").touch()
    Path("void.jsonl").touch()
    Path("broken.jsonl").write_text('{"text": ')
    Path("numbers.jsonl").write_text('{"text": 1}')
    Path("times.jsonl").write_text('{"text": "2024-01-01"}\n')
    Path("missing.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n{"text": "c"}\n')
    Path("latin1.txt").write_bytes("\xe9".encode("latin1"))
    Path("a.json").write_text('{\n"a": 1}')
    assert tokenize(*arguments, *(["--to=out"] if arguments else [])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(Path.cwd().glob("out*"))


def test_unrelated_directory_is_not_replaced(
    jsonl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [jsonl, "--to=out", "--tokenizer=bytes", "--workers=1"]
    Path("out.partial").mkdir()
    assert tokenize(*arguments) == 2
    message = "cannot create out.partial (File exists); remove what a killed one left"
    assert message in capsys.readouterr().err
    Path("out.partial").rmdir()
    assert tokenize(*arguments[:1], f"--to={300 * 'x'}", *arguments[2:]) == 2
    assert "File name too long" in capsys.readouterr().err
    assert tokenize(*arguments) == 0
    assert tokenize(*arguments) == 2
    assert "'out': exists; name a new directory, or remove this one" in capsys.readouterr().err


def test_tokenizer_without_end_of_text_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="has no end-of-sequence token; set eos_token in"):
        load_encoder(str(tmp_path))


def test_text_containing_end_of_text_is_refused(tokenizer: Path) -> None:
    """A token such as "the" is no special token, and occurs in texts."""
    encoder = load_encoder(str(tokenizer))
    end = encoder.encode(["the"])[0][0]
    encoder = replace(encoder, metadata=replace(encoder.metadata, end_of_text=end))
    with pytest.raises(ValueError, match="a document contains the end-of-text token"):
        encoder.documents(TEXTS)


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_token_dtype_follows_vocabulary_size(size: int, dtype: str) -> None:
    assert tokenizer_metadata("x", size, 0).dtype == dtype
