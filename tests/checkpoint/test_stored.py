from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distmp.checkpoint import store
from distmp.errors import CheckpointError


def test_loading_verifies_unless_that_was_done(tmp_path: Path) -> None:
    path: Path = store.save(tmp_path, 1, {"weight": torch.ones(300)}, {}, keep=1)
    checkpoint = store.StoredCheckpoint(path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "__0_0.distcp").write_bytes(bytes(data))
    found = {"weight": torch.zeros(300)}
    with pytest.raises(CheckpointError, match="does not hold what was written"):
        checkpoint.load(found)
    assert not found["weight"].any()
