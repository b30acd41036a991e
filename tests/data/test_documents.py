from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from distmp.config import load
from distmp.data import IGNORED
from distmp.data.build import build_datasets
from distmp.data.documents import PackedDocuments, document_positions
from distmp.data.identity import identity
from distmp.data.loading import step_batches
from distmp.data.settings import DataConfig
from distmp.distributed.world import World
from distmp.errors import ConfigError
from distmp.training.setup import prepare


@pytest.mark.parametrize(
    ("ends", "positions"),
    [
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0, 1, 0, 0], [0, 1, 0, 1]),
        ([1, 1, 0, 1], [0, 0, 0, 1]),
        ([1], [0]),
    ],
)
def test_positions_restart_after_the_end_of_a_document(
    ends: list[int], positions: list[int]
) -> None:
    assert document_positions(torch.tensor(ends, dtype=torch.bool)).tolist() == positions


def text(folder: Path) -> DataConfig:
    for name, content in (("a.py", "abc"), ("b.py", "d" * 20), ("c.py", "efghijklmnopqrs")):
        (folder / name).write_text(content)
    return DataConfig(path=str(folder), sequence_length=8, held_out=0.0, document_masking=True)


def test_files_of_text_are_documents(tmp_path: Path) -> None:
    sample = build_datasets(text(tmp_path)).train[0]
    assert sample["inputs"].tolist() == [97, 98, 99, 256, 100, 100, 100, 100]
    assert sample["targets"].tolist() == [98, 99, 256, IGNORED, 100, 100, 100, 100]
    assert sample["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_token_id_ends_documents_of_a_token_file(tmp_path: Path) -> None:
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes([5, 6, 9, 5, 5, 9, 7, 7, 7] * 4))
    settings: dict[str, Any] = {"source": "tokens", "path": str(file), "token_dtype": "uint8"}
    settings |= {"sequence_length": 8, "document_masking": True}
    train, validation, *_ = build_datasets(DataConfig(**settings, end_of_text=9, held_out=0.3))
    assert train[0]["positions"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert "positions" in validation[0]  # type: ignore[index]
    with pytest.raises(ConfigError, match="end_of_text = None: set it to the token id that ends"):
        build_datasets(DataConfig(**settings, held_out=0.3))


def test_order_and_identity_do_not_change(tmp_path: Path) -> None:
    packed = build_datasets(text(tmp_path))
    plain = packed._replace(train=packed.train.dataset)
    assert identity(packed) == identity(plain)
    assert packed.train.draws_nothing
    options: dict[str, Any] = {"seed": 1, "first_sample": 2, "rank": 1, "world_size": 2}
    options |= {"global_batch_size": 4, "microbatch_size": 1}
    for workers in (0, 1):
        ours, other = (
            step_batches(datasets.train, workers=workers, **options) for datasets in (packed, plain)
        )
        for mine, its in zip(next(ours), next(other), strict=True):
            assert torch.equal(mine["inputs"], its["inputs"])
        ours.close()
        other.close()


def test_copies_are_whole(tmp_path: Path) -> None:
    dataset = build_datasets(text(tmp_path)).train
    for other in (copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert isinstance(other, PackedDocuments)
        assert torch.equal(other[1]["positions"], dataset[1]["positions"])


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    for arguments, message in (
        (["--data.end-of-text", "3"], "end_of_text = 3: files of text have a fixed one"),
        (
            ["--data.source", "tokens", "--data.path", "x", "--data.end-of-text", "-1"],
            "data.end_of_text = -1: must be a token id: at least 0",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            load(arguments)
    text(tmp_path)
    arguments = ["--data.path", str(tmp_path), "--data.sequence-length", "8", "--data.held-out=0"]
    arguments += ["--data.document-masking", "--model.name", "torch.nn:Identity"]
    with pytest.raises(ConfigError, match=r"= True: torch\.nn:Identity does"):
        prepare(load(arguments), World(0, 1, torch.device("cpu"), None))


def test_attention_that_save_cannot_keep_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text(tmp_path)
    arguments = ["--data.path", str(tmp_path), "--data.sequence-length", "8", "--data.held-out=0"]
    arguments += ["--data.document-masking", "--activation-checkpointing"]
    for device, save, warns in (
        ("cpu", "[matmul, attention]", False),
        ("cuda", "[matmul]", False),
        ("cuda", "[matmul, attention]", True),
    ):
        caplog.clear()
        config = load([*arguments, f"{{save: {save}}}"])
        prepare(config, World(0, 1, torch.device(device), None))
        warning = "save = ['matmul', 'attention']: with data.document_masking on a GPU"
        assert (warning in caplog.text) == warns, (device, save)
