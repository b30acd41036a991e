from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from distmp.telemetry.records import RecordError, RecordWriter, StepRecord, read_records
from tests.disks import disk, fill
from tests.telemetry.samples import record

# Text that names a float is read back as that float.
_OTHER_TEXT = st.text().filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _OTHER_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_STRATEGY_OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(),
    "float": st.floats(),
    "bool": st.booleans(),
    "str": st.text(),
    "str | None": st.none() | st.text(),
    "float | None": st.none() | st.floats(),
    "list[float] | None": st.none() | st.lists(st.floats(), max_size=3),
    "dict[str, float] | None": st.none() | st.dictionaries(st.text(), st.floats(), max_size=3),
    "dict[str, Any] | None": st.none() | st.dictionaries(st.text(), _JSON, max_size=3),
}
_RECORDS = st.builds(
    StepRecord,
    **{field.name: _STRATEGY_OF_TYPE[str(field.type)] for field in dataclasses.fields(StepRecord)},
)


# Of no record: a run that resumes after it keeps all of them.
_LAST = 1 << 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@settings(max_examples=50, deadline=None)
@given(st.lists(_RECORDS, max_size=4))
@example([record(unit="NaN", formats="Infinity")])
def test_round_trip(records: list[StepRecord]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "records.jsonl"
        with closing(RecordWriter(path, _LAST, pytest.fail)) as writer:
            for item in records:
                writer.write(item)
        lines = path.read_text(encoding="ascii").split("\n")
        found = read_records(path)
    assert lines.pop() == ""
    assert [json.loads(line, parse_constant=_refuse)["step"] for line in lines] == [
        item.step for item in records
    ]
    # repr distinguishes NaN and inf, -0.0 and 0.0, and 1 and 1.0; and NaN equals NaN.
    assert repr(found) == repr(records)


def test_nan_and_infinities_are_distinguished(path: Path) -> None:
    with closing(RecordWriter(path, _LAST, pytest.fail)) as writer:
        writer.write(record(loss=math.nan, grad_norm=math.inf, validation_loss=-math.inf))
    (found,) = read_records(path)
    assert math.isnan(found.loss)
    assert found.grad_norm == math.inf
    assert found.validation_loss == -math.inf


def test_lines_are_readable_immediately(path: Path) -> None:
    writer = RecordWriter(path, _LAST, pytest.fail)
    for step in (1, 2, 3):
        writer.write(record(step))
        assert [found.step for found in read_records(path)] == list(range(1, step + 1))
    writer.close()


def _written(path: Path, steps: range, resume_after_step: int = _LAST) -> None:
    with closing(RecordWriter(path, resume_after_step, pytest.fail)) as writer:
        for step in steps:
            writer.write(record(step))


def _steps(path: Path) -> list[int]:
    return [found.step for found in read_records(path)]


def test_file_truncated_anywhere_keeps_complete_records(path: Path) -> None:
    _written(path, range(1, 3))
    content = path.read_bytes()
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        complete = content[:length].count(b"\n")
        assert _steps(path) == list(range(1, complete + 1)), length
        # Append after the cut: no line may be joined with the incomplete one.
        _written(path, range(complete + 1, 4), resume_after_step=complete)
        assert _steps(path) == [1, 2, 3], length


@pytest.mark.parametrize("resume_after_step", [0, 1, 4, 9, 10, 25])
def test_resumed_run_records_every_step_once(path: Path, resume_after_step: int) -> None:
    _written(path, range(1, 11))
    _written(path, range(resume_after_step + 1, 31), resume_after_step)
    expected = [*range(1, min(resume_after_step, 10) + 1), *range(resume_after_step + 1, 31)]
    assert _steps(path) == expected


def test_resume_that_saves_nothing_drops_no_record(path: Path) -> None:
    _written(path, range(1, 8))
    for _ in range(2):
        _written(path, range(3, 5), resume_after_step=2)
        assert _steps(path) == [1, 2, 3, 4]
    _written(path, range(7, 9), resume_after_step=6)
    assert _steps(path) == [*range(1, 9)]
    with closing(RecordWriter(path, 2, pytest.fail)) as writer:
        write_steps(writer, 3, 4)
        writer.saved()
    _written(path, range(5, 7), resume_after_step=5)
    assert _steps(path) == [1, 2, 3, 4, 5, 6]
    assert list(path.parent.iterdir()) == [path]


def test_complete_records_up_to_resume_step_are_kept(path: Path) -> None:
    _written(path, range(1, 4))
    with path.open("ab") as file:
        file.write(b'{"step": 4, "sam')
    _written(path, range(4, 6))
    assert _steps(path) == [1, 2, 3, 4, 5]


def test_dropping_records_is_atomic(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(path, range(1, 4))
    content = path.read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        assert path.read_bytes() == content
        raise OSError("no space left on device")

    messages: list[str] = []
    with monkeypatch.context() as context:
        context.setattr(os, "fsync", fail)
        writer = RecordWriter(path, 1, messages.append)
        write_steps(writer, 2, 3)
        writer.add_validation(3, 1.5, {})
        assert path.read_bytes() == content
        assert list(path.parent.iterdir()) == [path]
    writer.write(record(4))
    writer.close()
    assert written(path) == [(1, None), (2, None), (3, 1.5), (4, None)]
    assert [text.partition(":")[0] for text in messages] == [
        f"cannot write {path}",
        f"step records are written to {path} again",
    ]


def test_records_are_buffered_on_full_disk(tmp_path: Path) -> None:
    messages: list[str] = []
    with disk(tmp_path / "disk", "size=64k") as directory:
        path = directory / "records.jsonl"
        with closing(RecordWriter(path, _LAST, messages.append)) as writer:
            writer.write(record(1))
            ballast = fill(directory)
            for step in range(2, 40):  # more than fits into the rest of the page
                writer.write(record(step))
            found = _steps(path)
            assert found == list(range(1, len(found) + 1))
            assert 1 < len(found) < 39
            assert path.read_bytes().endswith(b"\n"), "no record is written in part"
            ballast.unlink()
            writer.write(record(40))
            assert _steps(path) == list(range(1, 41))
            fill(directory)
            for step in range(41, 80):
                writer.write(record(step))
            lost = 79 - len(_steps(path))
    assert messages[0] == (
        f"cannot write {path}: [Errno 28] No space left on device; training continues, and step "
        "records are buffered in memory"
    )
    assert messages[1] == f"step records are written to {path} again"
    assert messages[2] == messages[0]
    assert messages[3] == f"{lost} records are lost: cannot write {path}"
    assert len(messages) == 4


def test_cause_of_incomplete_write_is_reported(path: Path) -> None:
    messages: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with closing(RecordWriter(path, _LAST, messages.append)) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            for step in range(1, 5):
                writer.write(record(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert messages[0].startswith(f"cannot write {path}: [Errno 27] File too large; training")
        assert path.read_bytes().endswith(b"\n")
    assert len(messages) == 2


def test_deleted_file_is_created_again(tmp_path: Path) -> None:
    messages: list[str] = []
    path = tmp_path / "run" / "records.jsonl"
    with closing(RecordWriter(path, _LAST, messages.append)) as writer:
        writer.write(record(1))
        shutil.rmtree(path.parent)
        writer.write(record(2))
        writer.write(record(3))
    assert _steps(path) == [2, 3]
    assert messages == [f"{path} has vanished; later records go to a new file"]


def test_missing_directories_are_created(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first" / "records.jsonl"
    _written(path, range(1, 3), resume_after_step=0)
    assert _steps(path) == [1, 2]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b"7", b"\xff\xfe", b"\0\0\0", b'{"step":2}'])
def test_damaged_line_is_named(path: Path, line: bytes) -> None:
    _written(path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + line + b"\n" + lines[2])
    with pytest.raises(RecordError) as caught:
        read_records(path)
    assert f"{path}, line 2: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("loss", "low", "could not convert string to float: 'low'"),
        ("learning_rate", None, "float() argument must be a string or a real number"),
        ("validation_loss", "low", "could not convert string to float: 'low'"),
        ("memory_bytes", "1 GB", "'str' object cannot be interpreted as an integer"),
        ("step", 1.5, "'float' object cannot be interpreted as an integer"),
    ],
)
def test_value_that_is_no_number_is_named(path: Path, name: str, value: Any, problem: str) -> None:
    _written(path, range(1, 3))
    first, second = path.read_text().splitlines(keepends=True)
    path.write_text(first + json.dumps({**json.loads(second), name: value}) + "\n")
    with pytest.raises(RecordError) as caught:
        read_records(path)
    assert f"{path}, line 2: not a step record ({problem}" in str(caught.value)
    assert str(caught.value).endswith("); fix or delete that line")


def test_fields_of_later_versions_are_ignored(path: Path) -> None:
    _written(path, range(1, 2))
    values = {**json.loads(path.read_text()), "temperature": 71.5}
    del values["overflow"]
    path.write_text(json.dumps(values) + "\n")
    assert read_records(path) == [record(1)]


def test_overflow_without_json_form_writes_nothing(path: Path) -> None:
    with closing(RecordWriter(path, _LAST, pytest.fail)) as writer:
        with pytest.raises(TypeError):
            writer.write(record(1, overflow={"where": object()}))
        writer.write(record(2, overflow={"largest": [math.nan, 1.5]}))
    (found,) = read_records(path)
    assert found.step == 2
    assert repr(found.overflow) == "{'largest': [nan, 1.5]}"


def written(path: Path) -> list[tuple[int, float | None]]:
    return [(found.step, found.validation_loss) for found in read_records(path)]


def write_steps(writer: RecordWriter, *steps: int) -> None:
    for step in steps:
        writer.write(record(step))


def test_continued_run_drops_later_records(path: Path) -> None:
    writer = RecordWriter(path, 0, pytest.fail)
    write_steps(writer, 1, 2, 3)
    writer.close()
    writer = RecordWriter(path, 2, pytest.fail)
    write_steps(writer, 3, 4, 5)
    writer.rewind(3)
    write_steps(writer, 4)
    writer.close()
    assert [step for step, _ in written(path)] == [1, 2, 3, 4]


def test_late_validation_belongs_to_last_step(path: Path) -> None:
    writer = RecordWriter(path, 0, pytest.fail)
    write_steps(writer, 1, 2)
    writer.add_validation(2, 1.5, {})
    assert written(path) == [(1, None), (2, 1.5)]
    # A run whose last record is missing keeps its records.
    writer.add_validation(3, 1.25, {})
    writer.close()
    assert written(path) == [(1, None), (2, 1.5)]


def test_kill_while_validation_is_added_loses_no_record(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    writer = RecordWriter(path, 0, pytest.fail)
    write_steps(writer, 1, 2)
    with monkeypatch.context() as context, suppress(KeyboardInterrupt):
        context.setattr(RecordWriter, "_append", kill)
        writer.add_validation(2, 1.5, {})
    assert written(path) == [(1, None), (2, 1.5)]
    writer.close()


def test_buffered_records_before_rollback_are_kept(path: Path) -> None:
    path.mkdir()  # cannot be written
    writer = RecordWriter(path, 0, lambda message: None)
    write_steps(writer, 1, 2, 3)
    writer.rewind(2)
    writer.add_validation(2, 1.5, {})
    path.rmdir()
    write_steps(writer, 3)
    writer.close()
    assert written(path) == [(1, None), (2, 1.5), (3, None)]


def test_buffered_records_are_written_at_the_end_of_a_run(path: Path) -> None:
    path.mkdir()
    messages: list[str] = []
    with closing(RecordWriter(path, 0, messages.append)) as writer:
        write_steps(writer, 1, 2)
        path.rmdir()
    assert _steps(path) == [1, 2]
    assert messages[1:] == [f"step records are written to {path} again"]


def test_damaged_line_does_not_end_a_run(path: Path) -> None:
    messages: list[str] = []
    with closing(RecordWriter(path, 0, messages.append)) as writer:
        write_steps(writer, 1)
        good = path.read_bytes()
        path.unlink()  # as an editor does to replace the file
        path.write_bytes(good + b"a note\n{")
        write_steps(writer, 2)
        writer.add_validation(2, 1.5, {})
        write_steps(writer, 3)
    assert path.read_bytes().splitlines()[1] == b"a note"
    path.write_bytes(path.read_bytes().replace(b"a note\n", b""))
    assert _steps(path) == [1, 2, 3]
    assert len(messages) == 2
    assert messages[0] == f"{path} has vanished; later records go to a new file"
    assert messages[1].startswith("the validation after step 2 is not recorded: ")
    assert "line 2: not a step record" in messages[1]
    path.write_bytes(b"a note\n")
    with pytest.raises(RecordError, match="line 1: not a step record"):
        RecordWriter(path, _LAST, pytest.fail)
