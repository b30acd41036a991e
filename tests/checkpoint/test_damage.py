"""Any damage to the files of a checkpoint is detected or harmless."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distmp.checkpoint import manifest, recovery, saving
from distmp.checkpoint.loading import StoredCheckpoint
from distmp.checkpoint.manifest import STATE_FILE
from distmp.checkpoint.storage import INDEX_FILE
from distmp.errors import CheckpointError
from distmp.training.components import stored_progress
from distmp.utils.files import read_regular
from tests.checkpoint.tiny import same_bits, save, values, whole, zeros
from tests.ranks import run_ranks

CASES, ON_TWO_RANKS = 200, 50
OLD, NEW = "step-000001", "step-000002"


# Kinds of damage to a checkpoint. Each function gets the directory.


def a_file(path: Path, random: Random) -> Path:
    return random.choice(sorted(path.iterdir()))


def two_files(path: Path, random: Random) -> list[Path]:
    return random.sample(sorted(path.iterdir()), 2)


def some_bytes(random: Random, count: int = 20) -> bytes:
    return random.randbytes(random.randint(1, count))


def truncate(path: Path, random: Random) -> None:
    file = a_file(path, random)
    os.truncate(file, random.randrange(file.stat().st_size))


def empty(path: Path, random: Random) -> None:
    a_file(path, random).write_bytes(b"")


def append(path: Path, random: Random) -> None:
    with a_file(path, random).open("ab") as file:
        file.write(some_bytes(random))


def insert(path: Path, random: Random) -> None:
    file = a_file(path, random)
    data, at = file.read_bytes(), random.randrange(file.stat().st_size)
    file.write_bytes(data[:at] + some_bytes(random) + data[at:])


def flip_a_bit(path: Path, random: Random) -> None:
    file = a_file(path, random)
    data = bytearray(file.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    file.write_bytes(data)


def zero_a_block(path: Path, random: Random) -> None:
    file = a_file(path, random)
    data, at = bytearray(file.read_bytes()), random.randrange(file.stat().st_size)
    data[at : at + 512] = bytes(len(data[at : at + 512]))
    file.write_bytes(data)


def randomize(path: Path, random: Random) -> None:
    file = a_file(path, random)
    file.write_bytes(random.randbytes(file.stat().st_size))


def delete(path: Path, random: Random) -> None:
    a_file(path, random).unlink()


def swap(path: Path, random: Random) -> None:
    first, second = two_files(path, random)
    first.rename(path / "other")
    second.rename(first)
    (path / "other").rename(second)


def copy_over(path: Path, random: Random) -> None:
    shutil.copyfile(*two_files(path, random))


def take_from_the_older(path: Path, random: Random) -> None:
    file = a_file(path, random)
    shutil.copyfile(path.with_name(OLD) / file.name, file)


def make_a_directory_of_it(path: Path, random: Random) -> None:
    file = a_file(path, random)
    file.unlink()
    file.mkdir()


def link_to_nowhere(path: Path, random: Random) -> None:
    file = a_file(path, random)
    file.unlink()
    file.symlink_to("nowhere")


def change_the_version(path: Path, random: Random) -> None:
    edit(path, "format", random.choice([0, 2, 3, 10**30, -2, 2.5, "2", None, True, [2]]))


def change_the_step(path: Path, random: Random) -> None:
    edit(path, "step", random.choice([1, 3, "2", None]))


def change_a_number(path: Path, random: Random) -> None:
    edit(path, "numbers", {"step": 2, "samples": random.choice([8, 17, "16", None])})


def lose_the_list(path: Path, random: Random) -> None:
    edit(path, random.choice(["files", "crc32"]), random.choice([{}, "0", "00000000", None]))


def nest_deeply(path: Path, random: Random) -> None:
    (path / STATE_FILE).write_text("[" * random.choice([10, 100_000]))


def format_anew(path: Path, random: Random) -> None:
    """Harmless."""
    state = json.loads((path / STATE_FILE).read_text())
    (path / STATE_FILE).write_text(json.dumps(state, indent=random.choice([None, 1, 4])))


def add_a_file(path: Path, random: Random) -> None:
    """Harmless."""
    (path / "notes.txt").write_bytes(some_bytes(random))


def rename_the_directory(path: Path, random: Random) -> None:
    path.rename(path.with_name(f"step-{random.randint(3, 10_000_000):06d}"))


def rename_the_older(path: Path, random: Random) -> None:
    shutil.copytree(path.with_name(OLD), path.with_name(f"step-{random.randint(3, 99):06d}"))
    shutil.rmtree(path)


def empty_the_directory(path: Path, random: Random) -> None:
    shutil.rmtree(path)
    path.mkdir()


def make_a_file_of_the_directory(path: Path, random: Random) -> None:
    shutil.rmtree(path)
    path.write_bytes(some_bytes(random))


def not_finished(path: Path, random: Random) -> None:
    a_file(path, random).unlink()
    path.rename(path.with_suffix(".writing"))


DAMAGES: list[Callable[[Path, Random], None]] = [
    truncate, empty, append, insert, flip_a_bit, zero_a_block, randomize, delete, swap, copy_over,
    take_from_the_older, make_a_directory_of_it, link_to_nowhere, change_the_version,
    change_the_step, change_a_number, lose_the_list, nest_deeply, format_anew, add_a_file,
    rename_the_directory, rename_the_older, empty_the_directory, make_a_file_of_the_directory,
    not_finished,
]  # fmt: skip
HARMLESS = {format_anew, add_a_file}


def edit(path: Path, key: str, value: object) -> None:
    state = json.loads((path / STATE_FILE).read_text())
    (path / STATE_FILE).write_text(json.dumps(state | {key: value}, indent=2))


def test_damage(tmp_path: Path) -> None:
    """Two ranks save; two ranks load the first of the damaged checkpoints, one the others."""
    first, second = run_ranks(_save_and_load, 2, tmp_path, timeout=100)
    assert first == second, "all ranks must come to the same"
    outcomes = first + _load(tmp_path, range(ON_TWO_RANKS, CASES))
    assert len(outcomes) == CASES
    for case, (outcome, reports) in enumerate(outcomes):
        expected = ["loads right"] if damage_of(case) in HARMLESS else ["found out", "loads right"]
        assert outcome in expected, f"case {case}: {outcome}"
        assert reports or outcome == "loads right", f"case {case} is not reported"
        assert all("\n" not in report and len(report) < 500 for report in reports), reports


def damage_of(case: int) -> Callable[[Path, Random], None]:
    return DAMAGES[case % len(DAMAGES)]


def _save_and_load(tmp_path: Path) -> list[tuple[str, list[str]]]:
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        save(tmp_path / "whole", step, mesh)
    return _load(tmp_path, range(ON_TWO_RANKS), mesh)


def _load(
    tmp_path: Path, cases: range, mesh: DeviceMesh | None = None
) -> list[tuple[str, list[str]]]:
    """Return the outcome and the messages of each case."""
    outcomes = []
    for case in cases:
        directory = tmp_path / str(case)
        if mesh is None or mesh.get_rank() == 0:
            shutil.copytree(tmp_path / "whole", directory)
            damage_of(case)(directory / NEW, Random(case))
        if mesh is not None:
            dist.barrier()
        save_again = case < len(DAMAGES)
        outcomes.append(_outcome(directory, mesh, save_again=save_again))
    return outcomes


def _outcome(directory: Path, mesh: DeviceMesh | None, save_again: bool) -> tuple[str, list[str]]:
    checkpoint, damaged, unfinished, _ = recovery.usable(directory)
    reports = damaged + unfinished
    if checkpoint is None or checkpoint.path.name not in (OLD, NEW):
        return f"leads to {checkpoint}", reports
    path = checkpoint.path
    if path.name == OLD and not all(str(directory / "step-") in report for report in reports):
        return "is reported without a path", reports

    tensors, step = zeros(mesh), int(path.name[-1])
    try:
        checkpoint.load(tensors)
    except CheckpointError as error:
        return f"is found out too late: {error}", reports
    if not same_bits(tensors, values(step)):
        return "loads wrong values", reports
    if checkpoint.state.numbers != {"step": step, "samples": 8 * step}:
        return "loads wrong numbers", reports
    if path.name == NEW:
        return "loads right", reports

    tensors = zeros(mesh)
    with pytest.raises(CheckpointError, match="cannot be used"):
        StoredCheckpoint(directory / NEW).load(tensors)
    if not same_bits(tensors, whole(zeros())):
        return "is found out too late, after values were read", reports
    if save_again:  # over the damaged checkpoint
        saving.save(directory, 2, {"mark": torch.tensor(1.0)}, {}, keep=2)
        if recovery.usable(directory).checkpoint.path != directory / NEW:
            return "prevents another checkpoint", reports
    return "found out", reports


# Odd and forged files in a checkpoint: one message, and `auto` passes over them.


def save_weight(directory: Path, step: int, numbers: dict[str, Any] | None = None) -> Path:
    given = {"step": step, "samples": 8 * step} if numbers is None else numbers
    path = saving.save(directory, step, {"weight": torch.ones(4, 3)}, given, keep=9)
    assert isinstance(path, Path)
    return path


def huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda file: file.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda file: file.symlink_to(file.name),
    "huge": huge,
}


@pytest.mark.parametrize("name", [STATE_FILE, INDEX_FILE, "__0_0.distcp"])
@pytest.mark.parametrize("kind", ODD)
def test_irregular_or_large_file_is_reported_damaged(kind: str, name: str, tmp_path: Path) -> None:
    first, second = (save_weight(tmp_path, step) for step in (1, 2))
    (second / name).unlink()
    ODD[kind](second / name)
    checkpoint, [problem], *_ = recovery.usable(tmp_path)
    assert str(second / name) in problem
    assert checkpoint is not None
    assert checkpoint.path == first


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"12")
    (tmp_path / "link").symlink_to("small")
    assert read_regular(tmp_path / "link", 2) == b"12"
    with pytest.raises(OSError, match="2 bytes, more than 1"):
        read_regular(tmp_path / "small", 1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="Not a regular file"):
        read_regular(tmp_path / "pipe", 2)


def rewrite(path: Path, **values: Any) -> None:
    """Change state.json, and recompute its checksum."""
    content = manifest.read(path)
    assert content.files is not None
    given = {"step": content.step, "numbers": content.numbers} | values
    (path / STATE_FILE).write_bytes(manifest.encode(given["step"], given["numbers"], content.files))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"step": 3, "numbers": {"step": 3}}, "named after step 2, but it holds step 3"),
        ({"step": "2"}, "its step is '2', not a count"),
        ({"step": True}, "its step is 'True', not a count"),
    ],
)
def test_contradicting_numbers_are_refused(
    values: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    first, second = (save_weight(tmp_path, step) for step in (1, 2))
    rewrite(second, **values)
    found = recovery.usable(tmp_path)
    assert problem in found.damaged[0]
    assert found.checkpoint is not None
    assert found.checkpoint.path == first


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ("new", "its numbers are a str"),
        ({}, "they lack the step"),
        ({"step": 1}, "they lack the step or the position in the data"),
        ({"step": 1, "samples": "8"}, "samples is '8', not a count"),
        ({"step": 1, "samples": -8}, "samples is '-8', not a count"),
        ({"step": 1, "samples": 8, "ranks": 3}, "ranks is a int"),
    ],
)
def test_run_without_stored_position_is_refused(
    numbers: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    path = save_weight(tmp_path, 1, numbers)
    with pytest.raises(CheckpointError, match=problem):
        stored_progress(StoredCheckpoint(path))


def test_files_outside_of_the_directory_are_not_read(tmp_path: Path) -> None:
    path = save_weight(tmp_path, 1)
    state = json.loads((path / STATE_FILE).read_text())
    files = {f"../{path.name}/{name}": manifest.FileSum(file["bytes"], int(file["crc32"], 16))
             for name, file in state["files"].items()}  # fmt: skip
    (path / STATE_FILE).write_bytes(manifest.encode(1, state["numbers"], files))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        StoredCheckpoint(path).verify()
