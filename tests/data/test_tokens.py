from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmp.data.tokens import TokenFiles, count_tokens
from distmp.errors import ConfigError, DataError
from tests.torchrun import python, run


@given(
    st.lists(st.integers(0, 255), max_size=60),
    st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]),
    st.integers(1, 10),
    st.integers(0, 10),
)
def test_samples_are_windows_of_the_file(
    ids: list[int], dtype: str, length: int, first: int
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ids.bin"
        path.write_bytes(np.array(ids, dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        assert count_tokens(path, dtype) == len(ids)
        data = TokenFiles([path], dtype, 256, length).part(first, len(ids))
        windows = [ids[i : i + length + 1] for i in range(first, len(ids) - length, length)]
        assert len(data) == len(windows)
        for i, window in enumerate(windows):
            assert data[i]["inputs"].tolist() == window[:-1]
            assert data[i]["targets"].tolist() == window[1:]
            assert data[i]["inputs"].dtype == torch.int64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    return tmp_path / "ids.bin"


def test_id_outside_vocabulary_is_named_with_position(path: Path) -> None:
    data = TokenFiles([path], "uint16", 50, 10)
    assert data[3]["targets"].tolist() == list(range(31, 41))
    with pytest.raises(
        DataError, match=r"ids\.bin: token 50 is 50, outside the vocabulary of 50; check its tok"
    ):
        data[4]


def test_negative_id_is_refused(tmp_path: Path) -> None:
    np.array([1, 2, -7, 3], dtype=np.int32).tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match="token 2 is -7"):
        TokenFiles([tmp_path / "ids.bin"], "int32", 50, 3)[0]


def test_last_range_may_end_before_file(path: Path) -> None:
    data = TokenFiles([path], "uint16", 100, 10).part(20, 41)
    assert len(data) == 2
    assert data[1]["targets"].tolist() == list(range(31, 41))
    with pytest.raises(IndexError):
        data[2]


def test_truncated_file_is_named(path: Path) -> None:
    data = TokenFiles([path], "uint16", 100, 10)
    path.write_bytes(b"1234")
    with pytest.raises(DataError, match=r"cannot read .*ids\.bin any more"):
        data[5]


def test_pickled_dataset_is_small(path: Path) -> None:
    data = TokenFiles([path], "uint16", 100, 10)
    data[0]
    copy = pickle.dumps(data)
    assert len(copy) < 600
    assert torch.equal(pickle.loads(copy)[3]["inputs"], data[3]["inputs"])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.bin.*: cannot read it: No such file"):
        count_tokens(tmp_path / "none.bin", "uint16")


def test_size_not_divisible_by_dtype_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(ConfigError, match=r"5 bytes is not a multiple of 4.*check its tokens.json"):
        count_tokens(tmp_path / "odd.bin", "uint32")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 8))
def test_windows_cross_file_boundaries(sizes: list[int], length: int, first: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ids, files = np.arange(sum(sizes), dtype=np.uint16), []
        for number, piece in enumerate(np.split(ids, np.cumsum(sizes)[:-1])):
            files.append(Path(directory) / f"{number}.bin")
            piece.tofile(files[-1])
        data = TokenFiles(files, "uint16", 100, length).part(first, len(ids))
        starts = range(first, len(ids) - length, length)
        assert len(data) == len(starts)
        for i, start in enumerate(starts):
            assert data[i]["inputs"].tolist() == ids[start : start + length].tolist()
            assert data[i]["targets"].tolist() == ids[start + 1 : start + length + 1].tolist()


def test_id_outside_vocabulary_names_its_file(tmp_path: Path) -> None:
    for name, ids in {"a.bin": [1, 2, 3], "b.bin": [4, 9, 5]}.items():
        np.array(ids, np.uint16).tofile(tmp_path / name)
    data = TokenFiles([tmp_path / "a.bin", tmp_path / "b.bin"], "uint16", 9, 4)
    with pytest.raises(DataError, match=r"b\.bin: token 1 is 9, outside the vocabulary of 9"):
        data[0]


# Reads samples of the whole file, in the order of training, and its last one.
READ_LARGE_FILE = """
import sys
from pathlib import Path
from distmp.data.datasets import build_datasets
from distmp.data.order import sample_indices
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import TokenMetadata
from tests.memory_limit import limit_memory, status

path, room = Path(sys.argv[1]), 256 << 20
TokenMetadata("uint16", 10, {path.name: path.stat().st_size // 2}).write(path.parent)
limit_memory(room)
before = status("RssAnon")
config = DataConfig(source="tokens", path=str(path.parent), held_out=0.0, sequence_length=1023)
data = build_datasets(config).train
for index in sample_indices(0, 0, 2000, len(data)):
    assert not data[index]["inputs"].any()
assert data[len(data) - 1]["targets"][-3:].tolist() == [7, 8, 9]
size, grown = path.stat().st_size, 1024 * (status("RssAnon") - before)
assert size > 16 * room and grown < room / 4, (size, grown)
"""


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_file_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    path, size = tmp_path / "large.bin", 8 << 30
    with open(path, "wb") as file:
        # One token for the target of the last window. The rest is a hole that takes no space.
        file.truncate(size // 2046 * 2046 + 2 - 6)
        file.seek(0, 2)
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    assert path.stat().st_blocks * 512 < 1 << 20
    result = run(python("-c", READ_LARGE_FILE, str(path)), tmp_path)
    assert result.returncode == 0, result.stderr
