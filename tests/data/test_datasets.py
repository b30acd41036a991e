from __future__ import annotations

import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, Subset

from distmp.config import load
from distmp.data.datasets import Datasets, build_datasets, identity, is_held_out
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import TokenMetadata
from distmp.errors import ConfigError


def text(directory: Path, sizes: dict[str, int]) -> str:
    for name, size in sizes.items():
        (directory / name).write_bytes(bytes(i % 251 for i in range(size)))
    return str(directory)


# --- text ---


def test_default_text_is_standard_library_indexed_quickly() -> None:
    start = time.perf_counter()
    data = build_datasets(DataConfig())
    assert time.perf_counter() - start < 2.0
    assert data.vocabulary_size == 257
    assert data.validation is not None
    names = {name for name, _ in data.train.files}
    held_out = {name for name, _ in data.validation.files}
    assert "json/decoder.py" in names | held_out
    assert not names & held_out
    assert not any("site-packages" in name for name in names | held_out)
    assert 0.01 < len(held_out) / len(names) < 0.12
    directory = Path(sysconfig.get_path("stdlib"))
    first = (directory / data.train.files[0][0]).read_bytes()[:256]
    assert bytes(data.train[0]["inputs"].tolist()) == first
    version = sysconfig.get_python_version()
    share = len(data.validation) / (len(data.train) + len(data.validation))
    assert data.description == (
        f"standard library of Python {version}: samples for training: {len(data.train):,}, held "
        f"out: {len(data.validation):,} ({share:.1%})"
    )


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_larger_share_extends_held_out_files(name: str, a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert is_held_out(name, high) or not is_held_out(name, low)
    assert not is_held_out(name, 0.0)
    assert is_held_out(name, 1.0)


def test_held_out_share_agrees_with_setting() -> None:
    count = sum(is_held_out(f"directory/file_{i}.py", 0.05) for i in range(20_000))
    assert abs(count - 1000) < 4 * (20_000 * 0.05 * 0.95) ** 0.5


def test_new_files_keep_split_of_others(tmp_path: Path) -> None:
    path = text(tmp_path, {f"{i}.py": 50 for i in range(60)})
    config = DataConfig(path=path, held_out=0.3, sequence_length=8)
    before = build_datasets(config)
    text(tmp_path, {f"new_{i}.py": 50 for i in range(60)})
    after = build_datasets(config)
    share = len(before.validation) / (len(before.validation) + len(before.train))
    assert before.description.endswith(f"held out: {len(before.validation)} ({share:.1%})")
    assert {*before.train.files} < {*after.train.files}
    assert {*before.validation.files} < {*after.validation.files}


def test_single_file_is_split_by_tokens(tmp_path: Path) -> None:
    config = DataConfig(path=text(tmp_path, {"a.py": 999}), held_out=0.1, sequence_length=9)
    data = build_datasets(config)
    assert (len(data.train), len(data.validation)) == (99, 11)
    assert data.train[98]["targets"][-1] == 891 % 251
    assert data.validation[0]["inputs"][0] == 900 % 251


def test_nothing_is_held_out_at_zero(tmp_path: Path) -> None:
    path = text(tmp_path, {"a.py": 300, "b.py": 300})
    data = build_datasets(DataConfig(path=path, held_out=0.0, sequence_length=16))
    assert data.validation is None
    assert data.train.last == 602
    assert data.description == f"text below {path}: samples for training: 37, held out: 0"


def test_validation_directory_leaves_all_data_for_training(tmp_path: Path) -> None:
    for name in ("train", "other"):
        (tmp_path / name).mkdir()
    config = DataConfig(
        path=text(tmp_path / "train", {f"{i}.py": 30 for i in range(40)}),
        validation_path=text(tmp_path / "other", {"v.py": 30}),
        held_out=0.5,
        sequence_length=8,
    )
    data = build_datasets(config)
    assert len(data.train.files) == 40
    assert [name for name, _ in data.validation.files] == ["v.py"]


@pytest.mark.parametrize(
    ("sizes", "held_out", "setting", "message"),
    [
        ({"a.py": 15}, 0.0, "data.path", "16 tokens are too few where one sample needs 17"),
        ({"a.py": 20}, 0.2, "data.held_out", "leaves 17 for training and 4 held out, .* add data"),
        ({"a.py": 99}, 0.05, "data.held_out", "leaves 95 for training and 5 held out"),
    ],
)
def test_too_little_text_is_refused(
    tmp_path: Path, sizes: dict[str, int], held_out: float, setting: str, message: str
) -> None:
    config = DataConfig(path=text(tmp_path, sizes), held_out=held_out, sequence_length=16)
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(config)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", "not a directory"),
        ("short", r"too few .*; add data, or lower data\.sequence_length$"),
    ],
)
def test_validation_directory_errors_name_their_setting(
    tmp_path: Path, name: str, message: str
) -> None:
    (tmp_path / "short").mkdir()
    text(tmp_path / "short", {"v.py": 5})
    config = DataConfig(
        path=text(tmp_path, {"a.py": 100}), validation_path=str(tmp_path / name), sequence_length=50
    )
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(config)
    assert caught.value.setting == "data.validation_path"


@pytest.mark.parametrize("source", ["text", "tokens"])
def test_home_of_unknown_user_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.path = '~nouser/x': "):
        build_datasets(DataConfig(source=source, path="~nouser/x"))


# --- token files ---


def tokens(directory: Path, count: int) -> str:
    directory.mkdir()
    np.arange(count, dtype=np.uint16).tofile(directory / "ids")
    TokenMetadata("uint16", 2**16, {"ids": count}).write(directory)
    return str(directory)


def test_last_tokens_are_held_out(tmp_path: Path) -> None:
    path = tokens(tmp_path / "a", 1000)
    config = DataConfig(source="tokens", path=path, held_out=0.1, sequence_length=9)
    data = build_datasets(config)
    assert data.vocabulary_size == 65536
    assert data.train[len(data.train) - 1]["targets"][-1] == 891
    assert data.validation[0]["inputs"][0] == 900
    assert data.description == f"tokens of {path}: samples for training: 99, held out: 11 (10.0%)"


def test_validation_from_file_or_none(tmp_path: Path) -> None:
    values: dict[str, Any] = {"source": "tokens", "path": tokens(tmp_path / "a", 100)}
    other = tokens(tmp_path / "b", 50)
    data = build_datasets(DataConfig(**values, validation_path=other, sequence_length=9))
    assert (data.train.last, data.validation.last) == (100, 50)
    alone = build_datasets(DataConfig(**values, held_out=0.0, sequence_length=9))
    assert alone.validation is None
    with pytest.raises(ConfigError, match="50 tokens are too few") as caught:
        build_datasets(DataConfig(**values, validation_path=other, sequence_length=60))
    assert caught.value.setting == "data.validation_path"


def test_validation_ids_that_training_data_lacks_are_refused(tmp_path: Path) -> None:
    path, other = tokens(tmp_path / "a", 100), tokens(tmp_path / "b", 100)
    TokenMetadata("uint16", 300, {"ids": 100}).write(Path(path))
    values: dict[str, Any] = {"source": "tokens", "sequence_length": 9}
    with pytest.raises(ConfigError, match=r"has a vocabulary of 65,536, data\.path of 300"):
        build_datasets(DataConfig(path=path, validation_path=other, **values))
    build_datasets(DataConfig(path=other, validation_path=path, **values))


def tokenized(directory: Path, parts: dict[str, list[int]], **values: Any) -> TokenMetadata:
    """Write a directory as `distmp data tokenize` does."""
    directory.mkdir()
    for name, ids in parts.items():
        np.array(ids, values.get("dtype", "uint32")).tofile(directory / name)
    known: dict[str, Any] = {
        "dtype": "uint32",
        "vocabulary_size": 100_000,
        "end_of_text": 7,
        "tokenizer": "mine",
        "tokenizer_sha256": "a1",
        "documents": 1,
        "tokens": sum(map(len, parts.values())),
        "files": {name: len(ids) for name, ids in parts.items()},
    }
    metadata = TokenMetadata(**known | values)
    metadata.write(directory)
    return metadata


PARTS = {"b.bin": list(range(70_000, 70_060)), "a.bin": list(range(60))}


@pytest.mark.parametrize("size", ["257", None, 0, True])
def test_vocabulary_size_that_is_no_number_is_refused(tmp_path: Path, size: Any) -> None:
    tokenized(tmp_path / "data", PARTS, vocabulary_size=size)
    with pytest.raises(ConfigError, match=f"vocabulary_size = {size!r} is not a number of ids"):
        TokenMetadata.read(tmp_path / "data")


def test_tokenized_directory_needs_no_other_settings(tmp_path: Path) -> None:
    metadata = tokenized(tmp_path / "data", PARTS)
    assert TokenMetadata.read(tmp_path / "data") == metadata
    config = DataConfig(
        source="tokens", path=str(tmp_path / "data"), held_out=0.25, sequence_length=8
    )
    data = build_datasets(config)
    assert data.vocabulary_size == 100_000
    # The files are read in the order of the metadata, as one sequence.
    ids = PARTS["b.bin"] + PARTS["a.bin"]
    assert data.train[7]["inputs"].tolist() == ids[56:64]
    assert data.validation is not None
    assert data.validation[0]["inputs"].tolist() == ids[90:98]


@pytest.mark.parametrize(
    ("values", "setting", "message"),
    [
        ({"validation_path": "other"}, "data.validation_path", "with the tokenizer 'theirs'"),
        ({"validation_path": "ends"}, "data.validation_path", "token 8 after each .* and 7;"),
        ({"path": "halves"}, "data.path", r"halves/tokens\.json: dtype = 'float64' is not one of"),
        ({"path": "damaged"}, "data.path", r"a\.bin has 3 tokens, not the 60 of tokens\.json"),
        ({"path": "nothing"}, "data.path", r"is no directory with tokens\.json"),
        ({"path": "begun"}, "data.path", "is not finished; remove it and run `distmp"),
        ({"path": "odd"}, "data.path", r"cannot read odd/tokens\.json"),
        ({"path": "later"}, "data.path", r"has format 2; this version of distmp reads 1"),
        ({"path": "listed"}, "data.path", r"cannot read listed/tokens\.json"),
        ({"path": "outside"}, "data.path", r"names files of other directories"),
        ({"path": "words"}, "data.path", r"other than numbers of ids"),
    ],
)
@pytest.mark.usefixtures("cwd")
def test_settings_that_contradict_metadata_are_refused(
    values: dict[str, Any], setting: str, message: str
) -> None:
    for name in ("data", "damaged", "later"):
        tokenized(Path(name), PARTS)
    tokenized(Path("other"), PARTS, tokenizer="theirs", tokenizer_sha256="b2")
    tokenized(Path("ends"), PARTS, end_of_text=8)
    tokenized(Path("halves"), PARTS, dtype="float64")
    np.arange(3, dtype=np.uint32).tofile("damaged/a.bin")
    for name in ("nothing", "begun.partial", "odd"):
        Path(name).mkdir()
    Path("odd/tokens.json").write_text("{")
    tokenized(Path("listed"), PARTS, files=[*PARTS])
    tokenized(Path("outside"), PARTS, files={"../data/a.bin": 60})
    tokenized(Path("words"), PARTS, files={"a.bin": "60"})
    later = Path("later/tokens.json")
    later.write_text(later.read_text().replace('"format": 1', '"format": 2'))
    known: dict[str, Any] = {"source": "tokens", "path": "data", "sequence_length": 8}
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(DataConfig(**known | values))
    assert caught.value.setting == setting


# --- a user's function ---


class Squares:
    """Map-style dataset without tokens."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index * index


def squares(split: str, sequence_length: int, count: int = 10, **flags: bool) -> Any:
    if flags.get("nothing"):
        return None
    if split == "validation":
        return Squares(3) if flags.get("validate") else None
    dataset = Squares(count + sequence_length)
    dataset.vocabulary_size = 17  # type: ignore[attr-defined]
    return dataset


def iterator(split: str, sequence_length: int) -> Any:
    return iter([1, 2])


class Unsized:
    def __init__(self, split: str, sequence_length: int) -> None:
        pass

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> int:
        return index


class UnsizedStream(Unsized, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])


HERE = "tests.data.test_datasets"


def test_callable_gets_split_length_and_options() -> None:
    config = DataConfig(
        source=f"{HERE}:squares", sequence_length=5, options={"count": 20, "validate": True}
    )
    data = build_datasets(config)
    assert (len(data.train), len(data.validation), data.vocabulary_size) == (25, 3, 17)
    assert data.description == f"{HERE}:squares: samples for training: 25, held out: 3 (10.7%)"
    assert build_datasets(DataConfig(source=f"{HERE}:squares")).validation is None
    stream = build_datasets(DataConfig(source=f"{HERE}:UnsizedStream"))
    assert "samples for training: a stream" in stream.description


def permuted(split: str, sequence_length: int) -> Any:
    """Split the samples at random, with all default generators."""
    order = torch.randperm(100).tolist()
    order = [order[i] for i in np.random.permutation(random.sample(range(100), 100))]
    return Subset(range(100), order[:20] if split == "validation" else order[20:])  # type: ignore[arg-type]


def test_random_split_of_callable_shares_no_sample() -> None:
    data = build_datasets(DataConfig(source=f"{HERE}:permuted"))
    assert sorted([*data.train, *data.validation]) == [*range(100)]  # type: ignore[misc]


def subset(split: str, sequence_length: int) -> Any:
    return Subset(Subset(squares("train", sequence_length), range(9)), range(5))


def test_subset_has_vocabulary_of_its_dataset() -> None:
    assert build_datasets(DataConfig(source=f"{HERE}:subset")).vocabulary_size == 17


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("HERE", {}, "is a str; name a function or a class"),
        (
            "iterator",
            {},
            "for split='train' it returned a list_iterator, which can be read only once",
        ),
        ("squares", {"nothing": True}, "returned None for split='train'"),
        ("squares", {"count": -256}, "it returned a Squares, which has no sample"),
        ("Unsized", {}, r"which has no valid length \(NotImplementedError\); return"),
    ],
)
def test_callable_of_wrong_kind_is_refused(
    source: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build_datasets(DataConfig(source=f"{HERE}:{source}", options=options))
    assert caught.value.setting == "data.source"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("iterator", {"directory": "x"}, "got an unexpected keyword argument 'directory'"),
        ("Squares", {"count": 3}, "got an unexpected keyword argument 'split'"),
    ],
)
def test_unknown_options_are_refused_before_ranks_start(
    source: str, options: dict[str, Any], message: str
) -> None:
    problem = (
        f"data.source = '{HERE}:{source}': cannot be called with split, sequence_length and "
        f"data.options = {options} ({message}); change data.options or the function"
    )
    with pytest.raises(ConfigError) as caught:
        build_datasets(DataConfig(source=f"{HERE}:{source}", options=options))
    assert str(caught.value) == problem
    with pytest.raises(ConfigError) as at_the_start:
        load([f"--data.source={HERE}:{source}", "--data.options", str(options)])
    assert str(at_the_start.value) == problem


LENGTH = 4


def identity_of(directory: Path, files: dict[str, str], **settings: Any) -> dict[str, Any]:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    settings = {"held_out": 0.0, **settings}
    return identity(
        build_datasets(DataConfig(path=str(directory), sequence_length=LENGTH, **settings))
    )


FILES = {"a.py": "x" * 20, "b/c.py": "y" * 30}


def test_text_identity_is_independent_of_location(tmp_path: Path) -> None:
    first = identity_of(tmp_path / "here", FILES)
    assert first["samples"] == (20 + 1 + 30 + 1 - 1) // LENGTH
    assert first["vocabulary"] == 257
    assert identity_of(tmp_path / "there", FILES) == first
    for number, other in enumerate(
        (
            {"a.py": "x" * 21, "b/c.py": "y" * 29},
            {"a.py": "x" * 20, "b/d.py": "y" * 30},
            {"a.py": "x" * 20, "b/c.py": "y" * 29 + "z"},
            {**FILES, "e.py": "z"},
        )
    ):
        assert identity_of(tmp_path / str(number), other)["digest"] != first["digest"]


@pytest.mark.parametrize("settings", [{"pattern": "*.py"}, {"held_out": 0.4}])
def test_other_part_of_text_changes_identity(tmp_path: Path, settings: dict[str, Any]) -> None:
    first = identity_of(tmp_path / "here", FILES)
    assert identity_of(tmp_path / "here", FILES, **settings)["digest"] != first["digest"]


def test_token_identity_contains_number_and_dtype(tmp_path: Path) -> None:
    def tokens(size: int, dtype: str = "uint16", last: int = 0, **settings: Any) -> dict[str, Any]:
        path = tmp_path / f"{size} {dtype}"
        path.mkdir(exist_ok=True)
        np.append(np.zeros(size - 1), last).astype(dtype).tofile(path / "ids")
        TokenMetadata(dtype, 9, {"ids": size}).write(path)
        config = DataConfig(
            source="tokens", path=str(path), sequence_length=LENGTH, **{"held_out": 0.0, **settings}
        )
        return identity(build_datasets(config))

    first = tokens(100)
    assert {**first, "digest": first["digest"][:13]} == {
        "samples": 24,
        "vocabulary": 9,
        "digest": "uint16 0 100 ",
        "held_out": None,
        "held_out_digest": None,
    }
    assert tokens(100) == first
    assert tokens(100, last=1)["digest"] != first["digest"]
    assert tokens(101)["digest"] != first["digest"]
    assert tokens(100, held_out=0.2)["digest"] != first["digest"]
    assert tokens(100, "uint8")["digest"] != first["digest"]


def test_identity_of_user_data_has_counts() -> None:
    assert identity(Datasets([1, 2, 3], [1, 2], None, "")) == {
        "samples": 3,
        "vocabulary": None,
        "digest": None,
        "held_out": 2,
        "held_out_digest": None,
    }


def test_held_out_stream_without_length_has_an_identity() -> None:
    assert identity(Datasets([1, 2], UnsizedStream("validation", 1), None, ""))["held_out"] is None
