"""Windows over files, compared with windows over their concatenation in memory."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distmp.data.text import TextDirectory, list_text_files
from distmp.data.token_metadata import END_OF_FILE
from distmp.data.tokens import open_tokens
from distmp.errors import ConfigError, DataError
from distmp.export.weights import StoredWeights
from distmp.models.huggingface_files import has_tokenizer, locate


def write(directory: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return directory


def joined(contents: list[bytes]) -> list[int]:
    return [token for content in contents for token in (*content, END_OF_FILE)]


contents = st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8)


@given(contents, st.integers(1, 20), st.integers(0, 20), st.integers(0, 20))
def test_samples_are_windows_of_the_joined_bytes(
    contents: list[bytes], length: int, skip: int, cut: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = write(Path(name), {f"{i}.txt": c for i, c in enumerate(contents)})
        tokens = joined(contents)
        last = max(skip, len(tokens) - cut)
        files = list_text_files(directory, "*.txt")
        data = TextDirectory(directory, files, length).part(skip, last)
        windows = [tokens[i : i + length + 1] for i in range(skip, last - length, length)]
        assert len(data) == len(windows)
        for i, window in enumerate(windows):
            sample = data[i]
            assert sample["inputs"].tolist() == window[:-1]
            assert sample["targets"].tolist() == window[1:]
            assert sample["inputs"].dtype == sample["targets"].dtype == torch.int64


def test_files_are_sorted_and_empty_ones_omitted(tmp_path: Path) -> None:
    write(tmp_path, {"b.py": b"bb", "a/z.py": b"z", "a.py": b"", "a/b/c.py": b"ccc", "x.md": b"x"})
    files = list_text_files(tmp_path, "**/*.py")
    assert [*files.items()] == [("a/b/c.py", 3), ("a/z.py", 1), ("b.py", 2)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", {"a.py", "b.py"}),
        ("**/*.py", {"a.py", "b.py", "d/a.py", "d/e/a.py"}),
        ("d/**", {"d/a.py", "d/e/a.py", "d/e/note.md"}),
        ("**/e/*", {"d/e/a.py", "d/e/note.md"}),
        ("[!b].py", {"a.py"}),
        ("?.p[xy]", {"a.py", "b.py"}),
    ],
)
def test_patterns(tmp_path: Path, pattern: str, expected: set[str]) -> None:
    write(
        tmp_path,
        dict.fromkeys(
            ["a.py", "b.py", "d/a.py", "d/e/a.py", "d/e/note.md", ".hidden.py", ".git/a.py"], b"1"
        ),
    )
    assert {*list_text_files(tmp_path, pattern)} == expected


@pytest.mark.parametrize("pattern", ["[z-a].py", "[\\d].py", "[!].py"])
def test_invalid_or_unmatched_class_is_refused(tmp_path: Path, pattern: str) -> None:
    write(tmp_path, {"1.py": b"1"})
    with pytest.raises(
        ConfigError, match=r"data\.pattern = .*(is not a pattern|change data\.patt)"
    ):
        list_text_files(tmp_path, pattern)


def test_skipped_directories_and_pipes_are_omitted(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"1", "site-packages/b.py": b"1"})
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "dead.txt").symlink_to(tmp_path / "nowhere")
    assert [*list_text_files(tmp_path, "**/*.py", ["site-packages"])] == ["a.py"]


def test_linked_directories_are_listed_once(tmp_path: Path) -> None:
    write(tmp_path, {"in/a.py": b"1", "in/v2/b.py": b"1", "elsewhere/c.py": b"1"})
    for link in ("shard", "twice"):
        (tmp_path / "in" / link).symlink_to("../elsewhere")
    (tmp_path / "in" / "latest").symlink_to("v2")
    (tmp_path / "elsewhere" / "back").symlink_to("../in")
    (tmp_path / "root").symlink_to("in")
    for name in ("in", "root"):
        files = list_text_files(tmp_path / name, "**/*.py")
        assert [*files] == ["a.py", "shard/c.py", "v2/b.py"]
    write(tmp_path, {"in/.store/v1/d.py": b"1"})
    (tmp_path / "in" / "current").symlink_to(".store/v1")
    assert "current/d.py" in list_text_files(tmp_path / "in", "**/*.py")


def test_a_link_to_a_parent_is_refused_unless_it_is_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"in/a.py": b"1", "other/b.py": b"1"})
    (tmp_path / "in" / "up").symlink_to("..")
    with pytest.raises(ConfigError, match=r"the link .*in/up leads to a directory that contains"):
        list_text_files(tmp_path / "in", "**/*.py")
    assert [*list_text_files(tmp_path / "in", "**/*.py", ["up"])] == ["a.py"]


@pytest.mark.parametrize("target", ["nowhere", "d.py"])
def test_broken_links_are_refused(tmp_path: Path, target: str) -> None:
    write(tmp_path, {"a.py": b"1"})
    (tmp_path / "d.py").symlink_to(target)
    with pytest.raises(ConfigError, match=r"cannot read d\.py: .*exclude it by data\.pattern"):
        list_text_files(tmp_path, "**/*.py")


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path = .*not a directory .*; name a directory"):
        list_text_files(tmp_path / "none", "*")


def test_file_in_place_of_directory_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"1"})
    for setting in ("data.path", "data.validation_path"):
        advice = (
            f"run `distmp data tokenize`, and set data.source to tokens and {setting} to the dir"
        )
        with pytest.raises(ConfigError, match=f"{setting} = .* is not a directory .* {advice}"):
            list_text_files(tmp_path / "a.py", "*", setting=setting)


def test_directory_without_a_match_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.md": b"1"})
    with pytest.raises(ConfigError, match=r"= '\*.py'; change data.pattern, .* tokenize`"):
        list_text_files(tmp_path, "*.py")


def test_record_files_are_refused_as_text(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": b"1", "b/c.jsonl": b'{"text": "1"}'})
    assert [*list_text_files(tmp_path, "*.txt")] == ["a.txt"]
    with pytest.raises(ConfigError, match=r"b/c\.jsonl holds records.* `distmp data tokenize`"):
        list_text_files(tmp_path, "**/*")


def test_directory_of_empty_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": b"", "b.py": b""})
    with pytest.raises(ConfigError, match="all 2 files"):
        list_text_files(tmp_path, "*.py")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that any user may enter, used without root permissions."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        write(Path(name), {"a.py": b"1", "secret.py": b"1", "closed/b.py": b"1"})
        if user == 0:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            os.seteuid(user)
            os.chmod(Path(name) / "closed", 0o755)


def restrict(path: Path) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    os.chmod(path, 0)
    os.seteuid(user)


def test_unreadable_file_is_refused(open_directory: Path) -> None:
    restrict(open_directory / "secret.py")
    with pytest.raises(ConfigError, match=r"cannot read secret\.py: Permission denied; allow"):
        list_text_files(open_directory, "**/*.py")
    assert len(list_text_files(open_directory, "a.py")) == 1


def test_unreadable_directory_is_refused(open_directory: Path) -> None:
    restrict(open_directory / "closed")
    with pytest.raises(ConfigError, match=r"cannot list .*closed: Permission denied"):
        list_text_files(open_directory, "**/*.py")
    for use in (
        lambda path: list_text_files(path, "*"),
        lambda path: open_tokens(path, 4, "data.path"),
        lambda path: locate(f"hf:{path}"),
        lambda path: StoredWeights(path).shapes(),
    ):
        with pytest.raises(ConfigError, match=r"closed/b"):
            use(open_directory / "closed" / "b")
    assert not has_tokenizer(open_directory / "closed" / "b")


def directory_of(tmp_path: Path, files: dict[str, bytes], length: int = 4) -> TextDirectory:
    write(tmp_path, files)
    return TextDirectory(tmp_path, list_text_files(tmp_path, "**/*"), length)


@pytest.mark.parametrize("content", [b"123456789ab", b"123"])
def test_changed_file_is_named(tmp_path: Path, content: bytes) -> None:
    data = directory_of(tmp_path, {"a.txt": b"123456789a"})
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt had 10 bytes .* and has {len(content)} now"):
        data[0]


def test_deleted_file_is_named(tmp_path: Path) -> None:
    data = directory_of(tmp_path, {"a.txt": b"123456789a"})
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"cannot read .*a\.txt any more: No such file"):
        data[0]


@pytest.mark.parametrize("index", [-1, 2])
def test_index_out_of_range_raises_index_error(tmp_path: Path, index: int) -> None:
    data = directory_of(tmp_path, {"a.txt": b"12345678"})
    assert len(data) == 2
    with pytest.raises(IndexError):
        data[index]


def test_dataset_keeps_no_open_files_and_pickles_small(tmp_path: Path) -> None:
    data = directory_of(tmp_path, {f"{i}.txt": b"x" * 100_000 for i in range(3)}, length=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        before = len(os.listdir("/proc/self/fd"))
        for i in range(0, len(data), 500):
            data[i]
        assert len(os.listdir("/proc/self/fd")) == before
    copy = pickle.dumps(data)
    assert len(copy) < 2000
    assert torch.equal(pickle.loads(copy)[7]["inputs"], data[7]["inputs"])
