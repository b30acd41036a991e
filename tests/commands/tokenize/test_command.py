"""`distmp data tokenize`, in real processes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from distmp import cli
from distmp.commands.tokenize.encoder import Encoder, load_encoder
from distmp.commands.tokenize.tokenize import _owned
from distmp.config import load
from distmp.data.build import build_datasets
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import TokenMetadata
from distmp.errors import ConfigError
from distmp.training.run_fingerprint import tokenizer_folder
from tests.progress import wait_until
from tests.torchrun import TINY, environment, python

END = "<|endoftext|>"
TEXTS = [f"the quick brown fox {i} {END} jumps " * (i % 4) for i in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a small tokenizer and save it as transformers does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the quick brown fox jumps"] * 50, trainer)
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)
    return folder


def test_documents_are_neither_cut_nor_filled(
    tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer may do so, for the model that it was made for."""
    from tokenizers import Tokenizer

    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the encoder does
    encoder = load_encoder(str(tokenizer), None)
    backend = Tokenizer.from_str(encoder.definition or "")
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    cutting = replace(encoder, definition=backend.to_str())
    for found, expected in zip(cutting.encode(TEXTS), encoder.encode(TEXTS), strict=True):
        assert found.tolist() == expected.tolist()


@pytest.fixture
def jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    Path("in.jsonl").write_text("".join(lines))
    return "in.jsonl"


def ids_in(folder: Path) -> list[int]:
    metadata = TokenMetadata.read(folder)
    pieces = [np.fromfile(folder / name, metadata.dtype) for name in metadata.files]
    return list(np.concatenate(pieces).tolist())


def content(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}


def tokenize(*arguments: str) -> int:
    return cli.main(["data", "tokenize", *arguments])


def test_documents_of_a_local_tokenizer(
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
            "files": {"part-00000.bin": len(expected)},
        }.items()
    )
    assert len(written["tokenizer_sha256"]) == 64
    # A copy for models that are exported.
    copied = AutoTokenizer.from_pretrained("out/tokenizer")
    assert copied.get_vocab() == reference.get_vocab()
    config = load(["--data.source=tokens", "--data.path=out"])
    assert tokenizer_folder(config) == Path("out/tokenizer")
    assert f"out: 45 documents, {len(expected):,} tokens of uint16" in capsys.readouterr().out
    config = DataConfig(source="tokens", path="out", sequence_length=8, held_out=0)
    data = build_datasets(config)
    assert data.vocabulary_size == len(reference)
    assert data.train[1]["inputs"].tolist() == expected[8:16]


def test_the_output_does_not_depend_on_the_number_of_workers(jsonl: str) -> None:
    for workers in (1, 3):
        arguments = [f"--to={workers}", "--tokenizer=bytes", f"--workers={workers}"]
        assert tokenize(jsonl, *arguments, "--part-size=0.2KB") == 0
    assert content("1") == content("3")
    assert len(content("1")) > 10
    assert tokenize(jsonl, "--to=whole", "--tokenizer=bytes", "--workers=1") == 0
    expected = [byte for text in TEXTS if text for byte in [*text.encode(), 256]]
    assert ids_in(Path("1")) == ids_in(Path("whole")) == expected


def test_parts_without_tokens_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": text}) for text in ("a" * 2000, *[""] * 400, "b")]
    Path("in.jsonl").write_text("\n".join(lines))
    assert (
        tokenize("in.jsonl", "--to=out", "--tokenizer=bytes", "--workers=1", "--part-size=2KB") == 0
    )
    metadata = TokenMetadata.read(Path("out"))
    assert sorted(content("out")) == sorted([*metadata.files, "tokens.json"])
    assert (metadata.documents, metadata.tokens) == (2, 2003)


def test_a_run_needs_only_the_folder(jsonl: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tokenize(jsonl, "--to=out", "--tokenizer=bytes", "--workers=1", "--part-size=1KB") == 0
    run = ["train", *TINY, "--data.source=tokens", "--data.path=out", "--steps=2"]
    assert cli.main([*run, "--run-dir=run"]) == 0
    assert "held out, vocabulary of 257" in capsys.readouterr().out
    assert cli.main([*run, "--run-dir=other", "--model.vocabulary-size=100"]) == 2
    assert "model.vocabulary_size = 100: the data has 257 token ids" in capsys.readouterr().err


# Runs the command, and stops giving out work after three parts.
STALLED = """
import contextlib, sys, time
from distmp.commands.tokenize import command
from distmp.cli import main

@contextlib.contextmanager
def progress(parts):
    finished = []
    def on_part(index, counts):
        finished.append(index)
        while len(finished) == 3:
            time.sleep(0.05)
    yield on_part

if __name__ == "__main__":
    command._progress = progress
    sys.exit(main(["data", "tokenize", *sys.argv[1:]]))
"""


def test_a_killed_command_continues_with_the_same_result(
    jsonl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("stalled.py").write_text(STALLED)
    arguments = [jsonl, "--to=out", "--tokenizer=bytes", "--part-size=0.2KB"]
    command = python("stalled.py", *arguments, "--workers=2")
    partial = Path("out.partial")
    with subprocess.Popen(command, env=environment()) as process:
        wait_until(lambda: len([*partial.glob("part-*.bin")]) >= 4 or process.poll() is not None)
        assert process.poll() is None
        workers = psutil.Process(process.pid).children(recursive=True)
        assert tokenize(*arguments) == 2, "two commands must not write the same folder"
        assert "out.partial': another command is writing to it" in capsys.readouterr().err
        process.send_signal(signal.SIGKILL)
    psutil.wait_procs(workers, timeout=60)
    assert not [worker for worker in workers if worker.is_running()]
    assert not Path("out").exists()
    finished = {file: file.stat().st_ino for file in partial.glob("part-*.bin")}
    # Of a worker that was killed while it wrote.
    (partial / ".part-00009.bin.1.tmp").write_bytes(b"half")

    assert tokenize(*arguments[:-1], "--part-size=0.3KB") == 2
    assert "was begun with other values of input, --part-size" in capsys.readouterr().err
    assert tokenize(*arguments, "--workers=1") == 0
    kept = {file: (Path("out") / file.name).stat().st_ino for file in finished}
    assert kept == finished
    assert not partial.exists()
    assert tokenize(jsonl, "--to=undisturbed", *arguments[2:], "--workers=3") == 0
    assert content("out") == content("undisturbed")

    before = content("out")
    assert tokenize(*arguments) == 0, "an equal command has nothing left to do"
    assert tokenize(*arguments, "--key=other") == 2
    assert "'out': exists; name a new folder, or remove this one" in capsys.readouterr().err
    assert content("out") == before


class Killed(BaseException):
    """Ends a command as a kill does: nothing handles it."""


def without_processes(writer: Any, tasks: list[Any], workers: int) -> Iterator[Any]:
    yield from ((index, writer(*task)) for index, task in enumerate(tasks))


@contextlib.contextmanager
def killed_before(change: int) -> Iterator[None]:
    """Raise `Killed` in place of a rename or removal of a file, and of all that follow."""
    numbers = itertools.count()

    def unless_killed(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(numbers) >= change:
                raise Killed
            return function(*arguments, **keywords)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink"):
            patch.setattr(os, name, unless_killed(getattr(os, name)))
        yield


def test_parts_of_other_settings_are_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("distmp.commands.tokenize.tokenize.run_tasks", without_processes)
    lines = [json.dumps({"text": f"text {i}", "body": f"body {i}"}) + "\n" for i in range(9)]
    Path("in.jsonl").write_text("".join(lines))
    arguments = ["in.jsonl", "--tokenizer=bytes", "--part-size=0.15KB", "--workers=1"]
    expected = {}
    for key in ("text", "body"):
        assert tokenize(*arguments, f"--to={key}", f"--key={key}") == 0
        expected[key] = content(key)
    assert len(expected["text"]) > 2
    for change in itertools.count():
        to = f"--to={change}"
        with contextlib.suppress(Killed), killed_before(change):
            assert tokenize(*arguments, to, "--key=text") == 0
            break
        if tokenize(*arguments, to, "--key=body") == 0:
            assert content(str(change)) == expected["body"]
        else:
            assert tokenize(*arguments, to, "--key=text") == 0
            assert content(str(change)) == expected["text"]
    assert change > 6, "renames and removals of two parts, of the metadata and of the folder"


def test_parts_of_unknown_settings_are_refused(
    jsonl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out.partial").mkdir()
    Path("out.partial/part-00000.bin").write_bytes(b"12")
    assert tokenize(jsonl, "--to=out", "--tokenizer=bytes", "--workers=1") == 2
    error = capsys.readouterr().err
    assert "has files, but no tokens.json with their settings; remove it to begin again" in error


def test_a_worker_that_is_killed_is_one_message(
    jsonl: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmp.commands.tokenize.tokenize.PartWriter", KilledWriter)
    assert tokenize(jsonl, "--to=out", "--tokenizer=bytes", "--workers=1") == 1
    error = capsys.readouterr().err
    assert "a worker ended with exit code -9; run the same command again" in error


def test_a_worker_that_cannot_be_started_is_one_message(
    jsonl: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(process: SpawnProcess) -> None:
        # As `fork` does where the user has too many processes.
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(SpawnProcess, "start", start)
    assert tokenize(jsonl, "--to=out", "--tokenizer=bytes", "--workers=1") == 1
    error = capsys.readouterr().err
    assert "cannot start a worker: Resource temporarily unavailable; use fewer --workers" in error
    assert "another command" not in error


def test_only_the_lock_means_another_command(tmp_path: Path) -> None:
    busy = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    with (
        pytest.raises(ConfigError, match=r"cannot write .*: Resource temporarily unavailable"),
        _owned(tmp_path / "out"),
    ):
        raise busy


class KilledWriter:
    """Ends its process, as Linux does where memory is short."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: INPUT, --to"),
        (["none", "--tokenizer=bytes"], "INPUT = 'none': there is no such file or folder"),
        (["in.jsonl", "--tokenizer=none"], "--tokenizer = 'none': has no tokenizer.json"),
        (["in.jsonl", "--tokenizer=odd"], "--tokenizer = 'odd': transformers cannot load it"),
        (["in.jsonl", "--tokenizer=bytes", "--workers=0"], "--workers = 0: must be from 1"),
        (["in.jsonl", "--tokenizer=bytes", "--part-size=5"], "--part-size = '5': use a number"),
        (["in.jsonl", "--tokenizer=bytes", "--end-of-text=x"], "a document ends with 256"),
        (["in.jsonl", "--tokenizer=bytes", "--key=body"], "in.jsonl: the line at byte 0 has no"),
        (["empty", "--tokenizer=bytes"], "no document has a token"),
    ],
)
def test_errors_are_one_message(
    arguments: list[str], message: str, jsonl: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd").mkdir()
    Path("odd/tokenizer.json").write_text("{")
    Path("empty").mkdir()
    Path("empty/a.txt").touch()
    assert tokenize(*arguments, *(["--to=out"] if arguments else [])) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("out").exists()


def test_the_end_of_text_must_be_a_token(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="the tokenizer has no end-of-sequence token"):
        load_encoder(str(tmp_path), None)
    with pytest.raises(ConfigError, match="'</s>': is not a token of"):
        load_encoder(str(tmp_path), "</s>")
    assert load_encoder(str(tmp_path), END).end_of_text == 0


def test_a_text_with_the_end_of_text_is_refused(
    jsonl: str, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A token such as "the" is no special token, and occurs in texts."""
    ordinary = ["--end-of-text=the", "--workers=1", "--to=out"]
    assert tokenize(jsonl, f"--tokenizer={tokenizer}", *ordinary) == 2
    assert "in.jsonl: a document contains the end-of-text token" in capsys.readouterr().err


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_type_follows_from_the_vocabulary(size: int, dtype: str) -> None:
    assert Encoder("x", None, size, 0).dtype == dtype
