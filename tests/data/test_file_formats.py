"""Files that are not token ids are refused, and token ids are not."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmp import cli
from distmp.data.build import build_datasets
from distmp.data.settings import DataConfig
from distmp.errors import ConfigError

ROWS = "".join(json.dumps({"text": f"Straße {row}"}, ensure_ascii=False) + "\n" for row in range(9))
LONG = 30_000 * "ß\n"


def saved(write: Any) -> bytes:
    file = io.BytesIO()
    write(file, np.arange(4000, dtype="<u2"))
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("stories.jsonl", ROWS.encode(), "is text, not token ids; run `distmp data tokenize`"),
        ("train", ROWS.encode(), "is text, not token ids"),
        ("train", f"a{LONG}".encode(), "is text, not token ids"),  # a character ends at 64 KiB + 1
        ("latin.txt", "Straße ".encode("latin-1") * 9, "is text, not token ids"),
        ("train.parquet", b"PAR1" + bytes(4000), "is a parquet file, not token ids; run `distmp"),
        (
            "train.gz",
            gzip.compress(ROWS.encode(), mtime=0),
            "is a gzip file, not token ids; decompress it",
        ),
        ("train.npy", saved(np.save), "is a numpy file with a header, not token ids; write its"),
        ("train.npz", saved(np.savez), "is a zip file, not token ids; write ids without a header"),
    ],
)
@pytest.mark.parametrize("setting", ["path", "validation_path"])
def test_other_files_than_token_ids_are_refused(
    tmp_path: Path, setting: str, name: str, content: bytes, message: str
) -> None:
    (tmp_path / "ids").write_bytes(np.arange(4000, dtype="<u2").tobytes())
    (tmp_path / name).write_bytes(content)
    paths = {"path": str(tmp_path / "ids"), setting: str(tmp_path / name)}
    with pytest.raises(ConfigError) as caught:
        build_datasets(DataConfig(source="tokens", **paths))  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"data.{setting} = '{tmp_path / name}': {message}")


def test_token_ids_are_not_taken_for_text(tmp_path: Path) -> None:
    """Also few of them, large ones only, and text as ids of uint8."""
    file, generator = tmp_path / "ids", np.random.default_rng(1)
    for dtype in ("uint16", "uint32", "int32", "int64"):
        for low, high in ((0, 257), (0, 50_257), (8_192, 50_257)):
            for size in (40, 50_000):
                file.write_bytes(generator.integers(low, high, size).astype(dtype).tobytes())
                assert tokens(file, dtype) == size
    file.write_bytes(np.full(99, 10, dtype=np.uint16).tobytes())  # the id of a line end
    assert tokens(file, "uint16") == 99
    file.write_bytes(ROWS.encode())
    assert tokens(file, "uint8") == len(ROWS.encode())


def tokens(file: Path, dtype: Any) -> int:
    config = DataConfig(
        source="tokens",
        path=str(file),
        token_dtype=dtype,
        vocabulary_size=2**16 if dtype != "uint8" else None,
        sequence_length=8,
        held_out=0,
    )
    return int(build_datasets(config).train.last)


def test_the_advice_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, folder = tmp_path / "stories.jsonl", tmp_path / "tokens"
    source.write_text(ROWS)
    words = ["data", "tokenize", str(source), "--to", str(folder), "--tokenizer", "bytes"]
    assert cli.main(words) == 0, capsys.readouterr().err
    config = DataConfig(source="tokens", path=str(folder), sequence_length=8, held_out=0)
    assert build_datasets(config).vocabulary_size == 257


def test_a_format_as_the_source_leads_to_tokenize() -> None:
    with pytest.raises(ConfigError, match=r"text, tokens, or .*`distmp data tokenize` turns JSON"):
        DataConfig(source="jsonl")
