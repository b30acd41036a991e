"""`state.json`: the numbers of a checkpoint, and its files with their checksums.

It is written last, so a checkpoint that has one is complete. Its own checksum covers its content
and not its bytes: JSON with sorted keys and no spaces, without the checksum.

CRC-32 detects damage by disks, copies and crashes. It takes half the time of SHA-256 on a processor
with instructions for the latter. It does not protect against an attacker; `loading` makes sure that
a forged checkpoint runs no code.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from distmp.distributed.failing_together import describe
from distmp.errors import CheckpointError
from distmp.utils.files import read_regular

STATE_FILE = "state.json"
FORMAT = 1

_CHUNK_BYTES = 1 << 22
# Limits that no real file reaches: 100,000 ranks take 10 MB.
_LARGEST_BYTES = 1 << 26
_LARGEST_NUMBER = 1 << 62


class FileSum(NamedTuple):
    """Size and checksum of a file.

    Attributes:
        size: Size in bytes.
        crc32: CRC-32 of its bytes.
    """

    size: int = 0
    crc32: int = 0

    def extended(self, data: Any) -> FileSum:
        """Return the sum of the file with `data` appended.

        Args:
            data: An object with the buffer protocol.
        """
        return FileSum(self.size + memoryview(data).nbytes, zlib.crc32(data, self.crc32))


class Health(NamedTuple):
    """Whether a run should continue from a state.

    Attributes:
        problem: Why it should not; None for a healthy state.
        skipped_in_a_row: Number of steps that were skipped since the last applied update.
    """

    problem: str | None = None
    skipped_in_a_row: int = 0


HEALTHY = Health()


@dataclass(frozen=True)
class State:
    """The content of `state.json`.

    Attributes:
        step: Number of steps done.
        numbers: The numbers that the caller of `saving.save` passed.
        files: Size and checksum of the other files, by name.
        crc32: CRC-32 of the content.
        health: Whether a run should continue from this state.
        best: Step of the best checkpoint when this one was saved; None for none.
    """

    step: int
    numbers: dict[str, Any]
    files: dict[str, FileSum]
    crc32: int
    health: Health = HEALTHY
    best: int | None = None

    @property
    def updated_at(self) -> int:
        """Step of the last applied update: the weights are those of this step."""
        return self.step - self.health.skipped_in_a_row


def encode(
    step: int,
    numbers: dict[str, Any],
    files: dict[str, FileSum],
    health: Health = HEALTHY,
    best: int | None = None,
) -> bytes:
    """Return the bytes of `state.json`.

    Args:
        step: Number of steps done.
        numbers: Values that JSON can represent.
        files: Size and checksum of the other files, by name.
        health: Whether a run should continue from this state.
        best: Step of the best checkpoint so far; None for none.

    Raises:
        TypeError: If `numbers` holds a value that JSON cannot represent.
    """
    listed = {
        name: {"bytes": file.size, "crc32": f"{file.crc32:08x}"} for name, file in files.items()
    }
    state: dict[str, Any] = {"format": FORMAT, "step": step, "numbers": numbers, "files": listed}
    if health.problem is not None:
        state["unhealthy"] = health.problem
    if health.skipped_in_a_row:
        state["skipped_in_a_row"] = health.skipped_in_a_row
    if best is not None:
        state["best"] = best
    # The sum covers what will be read: JSON converts other keys to strings.
    state["crc32"] = f"{_content_sum(json.loads(json.dumps(state))):08x}"
    return json.dumps(state, indent=2).encode() + b"\n"


def read(path: Path) -> State:
    """Read and check `state.json` of the checkpoint at `path`.

    Raises:
        CheckpointError: If it is missing, damaged, or has a format that this version cannot read.
    """
    file = path / STATE_FILE
    try:
        state = json.loads(read_regular(file, _LARGEST_BYTES))
        if state["format"] == FORMAT:
            return _decode(state)
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        problem = "is empty or truncated, or was changed: it holds no JSON"
        raise CheckpointError(f"{file} {problem} ({error})") from error
    except Exception as error:
        raise CheckpointError(f"{file} cannot be read: {describe(error)}") from error
    raise CheckpointError(
        f"{file} has format {state['format']!r}; this version of distmp reads format {FORMAT}"
    )


def readable_state(path: Path) -> State | None:
    """Return the content of `state.json` of the checkpoint at `path`; None if it is damaged."""
    try:
        return read(path)
    except CheckpointError:
        return None


def verify_file(path: Path, expected: FileSum) -> None:
    """Check that a file holds what was written, by reading it once.

    Args:
        path: The file.
        expected: Its size and checksum when it was written.

    Raises:
        CheckpointError: If the file is missing, cannot be read, or holds something else.
    """
    check_size(path, expected)
    actual = FileSum()
    try:
        with path.open("rb") as file:
            while data := file.read(_CHUNK_BYTES):
                actual = actual.extended(data)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {describe(error)}") from error
    check_sum(path, actual, expected)


def check_size(path: Path, expected: FileSum) -> None:
    """Check that a file exists and has the size that was written.

    Raises:
        CheckpointError: If it does not.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file")
    if (size := path.stat().st_size) != expected.size:
        raise CheckpointError(f"{path} has {size} bytes, not the {expected.size} that were written")


def check_sum(path: Path, actual: FileSum, expected: FileSum) -> None:
    """Compare size and checksum of a file with those that were written.

    Raises:
        CheckpointError: If they differ.
    """
    if actual != expected:
        raise CheckpointError(
            f"{path} does not hold what was written (its CRC-32 is {actual.crc32:08x}, not "
            f"{expected.crc32:08x})"
        )


def check_number(name: str, value: object) -> int:
    """Return a count that was read from JSON.

    Raises:
        CheckpointError: If it is not an integer, negative, or too large.
    """
    if type(value) is not int or not 0 <= value < _LARGEST_NUMBER:
        raise CheckpointError(f"{name} is {str(value)[:80]!r}, not a count")
    return value


def _decode(state: dict[str, Any]) -> State:
    written = int(state.pop("crc32"), 16)
    if _content_sum(state) != written:
        raise CheckpointError("its content does not match its checksum")
    files = {
        check_name(name): FileSum(file["bytes"], int(file["crc32"], 16))
        for name, file in state["files"].items()
    }
    health = Health(state.get("unhealthy"), state.get("skipped_in_a_row", 0))
    step = check_number("its step", state["step"])
    if not isinstance(state["numbers"], dict):
        raise CheckpointError(f"its numbers are a {type(state['numbers']).__name__}")
    return State(step, state["numbers"], files, written, health, state.get("best"))


def check_name(name: str) -> str:
    """Return the name of a file of a checkpoint.

    Raises:
        CheckpointError: If it is not that of a file inside the directory.
    """
    if Path(name).name != name:
        raise CheckpointError(f"it names a file outside the checkpoint, {name!r}")
    return name


def _content_sum(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True, separators=(",", ":")).encode())
