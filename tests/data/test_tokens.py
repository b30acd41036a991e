from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmp.data.errors import DataError
from distmp.data.tokens import TokenFile, count_tokens
from distmp.errors import ConfigError


@given(
    st.lists(st.integers(0, 255), max_size=60),
    st.sampled_from(["uint8", "uint16", "uint32", "int32", "int64"]),
    st.integers(1, 10),
    st.integers(0, 10),
)
def test_samples_are_windows_of_the_file(
    ids: list[int], dtype: str, length: int, first: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.bin"
        path.write_bytes(np.array(ids, dtype).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        assert count_tokens(path, dtype) == len(ids)
        data = TokenFile(path, dtype, 256, length, first)
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


def test_id_outside_the_vocabulary_is_named_with_its_position(path: Path) -> None:
    data = TokenFile(path, "uint16", 50, 10)
    assert data[3]["targets"].tolist() == list(range(31, 41))
    with pytest.raises(
        DataError, match=r"ids\.bin: token 50 is 50, outside the vocabulary of 50; check data\.voc"
    ):
        data[4]


def test_negative_id_is_refused(tmp_path: Path) -> None:
    np.array([1, 2, -7, 3], dtype=np.int32).tofile(tmp_path / "ids.bin")
    with pytest.raises(DataError, match="token 2 is -7"):
        TokenFile(tmp_path / "ids.bin", "int32", 50, 3)[0]


def test_last_range_ends_before_the_file_does(path: Path) -> None:
    data = TokenFile(path, "uint16", 100, 10, 20, 41)
    assert len(data) == 2
    assert data[1]["targets"].tolist() == list(range(31, 41))
    with pytest.raises(IndexError):
        data[2]


def test_file_that_shrank_is_named(path: Path) -> None:
    data = TokenFile(path, "uint16", 100, 10)
    path.write_bytes(b"1234")
    with pytest.raises(DataError, match=r"cannot read .*ids\.bin any more"):
        data[5]


def test_copies_are_small(path: Path) -> None:
    data = TokenFile(path, "uint16", 100, 10)
    data[0]
    copy = pickle.dumps(data)
    assert len(copy) < 600
    assert torch.equal(pickle.loads(copy)[3]["inputs"], data[3]["inputs"])


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path = .*no such file; name a file of uint16"):
        count_tokens(tmp_path / "none.bin", "uint16")


def test_folder_in_place_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder, not a file"):
        count_tokens(tmp_path, "uint16")


def test_size_that_is_no_multiple_is_refused(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(
        ConfigError, match=r"5 bytes is not a multiple of 4.*check data.token_dtype"
    ):
        count_tokens(tmp_path / "odd.bin", "uint32")
