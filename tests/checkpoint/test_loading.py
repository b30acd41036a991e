from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from distmp.checkpoint import manifest, saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.storage import INDEX_FILE
from distmp.errors import CheckpointError
from tests.checkpoint.sealing import seal


def test_load_verifies_unless_already_verified(tmp_path: Path) -> None:
    path: Path = saving.save(tmp_path, 1, {"weight": torch.ones(300)}, {}, keep=1)
    checkpoint = StoredCheckpoint(path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(data))
    found = {"weight": torch.zeros(300)}
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        checkpoint.load(found)
    assert not found["weight"].any()


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES}
    path = saving.save(tmp_path, 1, tensors, {}, keep=1)
    assert isinstance(path, Path)
    return path


def read_index(path: Path) -> Any:
    return StoredCheckpoint(path).index


class Payload:
    """Runs `function(*args)` when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def rewrite(path: Path, index: Any) -> None:
    (path / INDEX_FILE).write_bytes(pickle.dumps(index))
    deceive(path)


def deceive(path: Path) -> None:
    """Recompute the checksums, if there are any."""
    if manifest.read(path).files is not None:
        seal(path)


def test_index_agrees_with_dcp(path: Path) -> None:
    trusted = pickle.loads((path / INDEX_FILE).read_bytes())
    assert read_index(path) == trusted


@pytest.mark.parametrize("function", [os.mkdir, torch.save, eval], ids=["os", "torch", "eval"])
def test_code_in_the_index_is_refused(path: Path, function: Callable[..., Any]) -> None:
    mark = path / "executed"
    args = {os.mkdir: (mark,), torch.save: (0, mark), eval: (f"__import__('os').mkdir('{mark}')",)}
    rewrite(path, Payload(function, *args[function]))
    pickle.loads((path / INDEX_FILE).read_bytes())
    assert mark.exists(), "the attack must work on somebody who just unpickles"
    mark.rmdir() if mark.is_dir() else mark.unlink()
    deceive(path)

    tensors = {"torch.float32": torch.ones(2, 3)}
    for read in (read_index, lambda path: StoredCheckpoint(path).load(tensors)):
        with pytest.raises(CheckpointError, match="which no checkpoint needs"):
            read(path)
    assert not mark.exists()


def test_pickled_object_in_place_of_tensor_is_refused(path: Path) -> None:
    mark = path / "executed"
    index = read_index(path)
    index.state_dict_metadata["torch.float32"] = BytesStorageMetadata()
    [entry] = [e for i, e in index.storage_data.items() if i.fqn == "torch.float32"]
    attack = path / entry.relative_path
    torch.save(Payload(os.mkdir, mark), attack)
    entry.offset, entry.length = 0, attack.stat().st_size
    rewrite(path, index)
    with pytest.raises(CheckpointError, match="cannot be used"):
        StoredCheckpoint(path).load({"torch.float32": torch.ones(2, 3)})
    assert not mark.exists()


def test_pickled_object_in_a_data_file_is_refused(path: Path) -> None:
    mark = path / "executed"
    index = read_index(path)
    index.storage_data = {
        key: entry for key, entry in index.storage_data.items() if key.fqn == "torch.float32"
    }
    index.state_dict_metadata = {"torch.float32": index.state_dict_metadata["torch.float32"]}
    [entry] = index.storage_data.values()
    attack = path / entry.relative_path
    torch.save(Payload(os.mkdir, mark), attack)
    entry.offset, entry.length = 0, attack.stat().st_size
    rewrite(path, index)
    read_index(path)
    with pytest.raises(CheckpointError, match=r"is damaged, or holds other objects$") as error:
        StoredCheckpoint(path).load({"torch.float32": torch.ones(2, 3)})
    assert "weights_only" not in str(error.value)  # torch's advice to run the code
    assert not mark.exists()


def test_file_outside_the_checkpoint_is_refused(path: Path) -> None:
    index = read_index(path)
    for entry in index.storage_data.values():
        entry.relative_path = f"../{path.name}/{entry.relative_path}"
    rewrite(path, index)
    with pytest.raises(CheckpointError, match="there is no"):
        read_index(path)


def test_parts_that_leave_elements_out_are_refused(path: Path) -> None:
    index = read_index(path)
    tensor = index.state_dict_metadata["torch.float32"]
    half = ChunkStorageMetadata(tensor.chunks[0].offsets, torch.Size([1, 3]))
    tensor.chunks = [half, half]
    rewrite(path, index)
    with pytest.raises(CheckpointError, match=r"its parts of 'torch\.float32' are not the whole"):
        read_index(path)


def _truncate_index(path: Path) -> None:
    os.truncate(path / INDEX_FILE, (path / INDEX_FILE).stat().st_size // 2)


def _empty_index(path: Path) -> None:
    (path / INDEX_FILE).write_bytes(b"")


def _declare_something_else(path: Path) -> None:
    index = read_index(path)
    index.state_dict_metadata["torch.bool"] = index.storage_meta
    rewrite(path, index)


def _declare_text_as_dtype(path: Path) -> None:
    index = read_index(path)
    index.state_dict_metadata["torch.bool"].properties.dtype = "text"  # type: ignore[union-attr]
    rewrite(path, index)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (_declare_text_as_dtype, "'torch.bool' has the dtype 'text'"),
        (_declare_something_else, "'torch.bool' is not a tensor"),
        (_truncate_index, "cannot be used"),
        (lambda path: rewrite(path, {"a": 1}), "it holds a dict"),
        (_empty_index, "cannot be used: (EOF|Value)Error"),
    ],
)
def test_damage_is_found_before_loading(
    path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    damage(path)
    deceive(path)
    with pytest.raises(CheckpointError, match=problem):
        read_index(path)


def test_missing_checkpoint_is_refused(path: Path) -> None:
    shutil.rmtree(path)
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        read_index(path)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes_as_index_are_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "state.json").write_bytes(manifest.encode(1, {}, {}))
        (path / INDEX_FILE).write_bytes(data)
        seal(path)
        with pytest.raises(CheckpointError, match="cannot be used"):
            read_index(path)
