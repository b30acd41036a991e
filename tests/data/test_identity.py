from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from distmp.data.build import build_datasets, identity
from distmp.data.settings import DataConfig
from distmp.data.token_metadata import TokenMetadata

LENGTH = 4


def text(directory: Path, files: dict[str, str], **settings: Any) -> dict[str, Any]:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    settings = {"held_out": 0.0, **settings}
    return identity(
        build_datasets(DataConfig(path=str(directory), sequence_length=LENGTH, **settings))
    )


FILES = {"a.py": "x" * 20, "b/c.py": "y" * 30}


def test_text_is_known_by_names_and_sizes_wherever_it_lies(tmp_path: Path) -> None:
    first = text(tmp_path / "here", FILES)
    assert first["samples"] == (20 + 1 + 30 + 1 - 1) // LENGTH
    assert first["vocabulary"] == 257
    assert text(tmp_path / "there", FILES) == first
    for number, other in enumerate(
        (
            {"a.py": "x" * 21, "b/c.py": "y" * 29},
            {"a.py": "x" * 20, "b/d.py": "y" * 30},
            {**FILES, "e.py": "z"},
        )
    ):
        assert text(tmp_path / str(number), other)["digest"] != first["digest"]


@pytest.mark.parametrize("settings", [{"pattern": "*.py"}, {"held_out": 0.4}])
def test_another_part_of_the_text_is_other_data(tmp_path: Path, settings: dict[str, Any]) -> None:
    first = text(tmp_path / "here", FILES)
    assert text(tmp_path / "here", FILES, **settings)["digest"] != first["digest"]


def test_tokens_are_known_by_number_and_type(tmp_path: Path) -> None:
    def tokens(size: int, dtype: str = "uint16", **settings: Any) -> dict[str, Any]:
        path = tmp_path / f"{size} {dtype}"
        path.mkdir(exist_ok=True)
        (path / "ids").write_bytes(bytes(size * np.dtype(dtype).itemsize))
        TokenMetadata(dtype, 9, {"ids": size}).write(path)
        config = DataConfig(
            source="tokens",
            path=str(path),
            sequence_length=LENGTH,
            **{"held_out": 0.0, **settings},
        )
        return identity(build_datasets(config))

    first = tokens(100)
    assert first == {"samples": 24, "vocabulary": 9, "digest": "uint16 0 100"}
    assert tokens(101)["digest"] != first["digest"]
    assert tokens(100, held_out=0.2)["digest"] != first["digest"]
    assert tokens(100, "uint8")["digest"] != first["digest"]


def test_data_of_a_user_are_counted_and_may_say_more() -> None:
    config = DataConfig(source="tests.data.test_identity:plain")
    assert identity(build_datasets(config)) == {"samples": 3, "vocabulary": None, "digest": None}


def plain(split: str, sequence_length: int) -> list[int] | None:
    return [1, 2, 3] if split == "train" else None
