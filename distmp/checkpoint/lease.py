"""A lease on a directory: at any time, at most one job owns it.

The lease is a small file in the directory, `lease-000001.json`, that its owner rewrites every third
of its length. The lease with the highest number counts, and a directory gets a new owner only by
the exclusive creation of the next number. Local file systems and NFS do this atomically.

# Note [Two owners]
# An owner extends its lease by a write to its own file, which may only count if it is complete
# before the lease expires: a job that watches the file has then seen it change. A lease that has
# expired on the clock of its owner (the process was stopped, the storage hung) is extended like any
# other takeover, by the creation of the next number, which succeeds for one job only. No clock is
# compared with that of another machine: the owner measures from the start of its last write, and a
# job that waits measures from when it has first seen that write, which is later.
"""

from __future__ import annotations

import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from distmp.errors import DistmpError
from distmp.utils.processes import ProcessIdentity

# Length of a lease; how often per length its owner renews it, and how often others read it.
SECONDS = 30.0
RENEWALS = 3
LOOKS = 60

RUNNING, ENDING, RELEASED = "running", "ending", "released"

_NAME = re.compile(r"lease-(\d+)\.json")
# A file of constant size is overwritten in place, which also works on a full disk.
_FILE_BYTES = 1024


def clock() -> float:
    """Return seconds on a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class Owner:
    """The job that owns a directory.

    Attributes:
        job: Identity of the job, which the restarts of its ranks share.
        host: Name of the machine of rank 0, for messages.
        process: The process of rank 0.
        scheduler: Name of the scheduler's job, which it keeps when it is requeued; "" without one.
        requeues: How often that job was requeued.
        run_directory: Path of the directory of the run; "" if it is not known.
    """

    job: str
    host: str
    process: ProcessIdentity
    scheduler: str = ""
    requeues: int = 0
    run_directory: str = ""

    def __str__(self) -> str:
        name = f" of job {self.scheduler}" if self.scheduler else ""
        return f"process {self.process.pid}{name} on {self.host}"

    def replaces(self, other: Owner) -> bool:
        """Return whether the other owner is known to have ended, or is an earlier attempt."""
        same = self.scheduler and self.scheduler == other.scheduler
        return (
            self.job == other.job
            or self.process == other.process
            or bool(same and self.requeues > other.requeues)
            or other.process.has_ended()
        )


@dataclass(frozen=True)
class Content:
    """The content of a lease.

    Attributes:
        owner: The job.
        state: `RUNNING`; `ENDING` while the job writes its last files; `RELEASED` after that.
        count: Number of renewals.
        seconds: Length of the lease in seconds.
    """

    owner: Owner
    state: str = RUNNING
    count: int = 0
    seconds: float = SECONDS

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return json.dumps(dataclasses.asdict(self)).encode().ljust(_FILE_BYTES - 1) + b"\n"

    @classmethod
    def decode(cls, data: bytes) -> Content | None:
        """Return the content of a file; None if it is being written, or is not a lease."""
        try:
            fields = json.loads(data)
            owner = fields.pop("owner")
            process = ProcessIdentity(*owner.pop("process"))
            return cls(Owner(**owner, process=process), **fields)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


# Called with the owner that a job waits for.
OnWait = Callable[[Owner], object]


class HeldError(DistmpError):
    """Another job owns the directory.

    Args:
        owner: The other job.
    """

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        super().__init__(f"owned by {owner}")


class Lease:
    """The lease on one directory. Methods may be called from several threads.

    Args:
        directory: The directory, which exists.
        owner: This job.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self.directory = directory
        self._content = Content(owner)
        self._clock: Callable[[], float] = clock
        self._sleep: Callable[[float], object] = time.sleep
        self._number: int | None = None
        self._expires = 0.0
        self._lost_to: Owner | None = None
        self._lock = threading.RLock()

    @property
    def is_valid(self) -> bool:
        """Whether this job owns the directory, without reading the file."""
        owned = self._number is not None and self._lost_to is None
        return owned and self._clock() < self._expires

    def claim(self, on_wait: OnWait = lambda owner: None, *, first: bool = False) -> None:
        """Become the owner. Waits while the directory may still belong to a job that has ended.

        Args:
            on_wait: Called before each check with the owner that the job waits for. It may raise an
                exception to end the wait.
            first: Only if the owner is known to have ended, or there was none; does not wait.

        Raises:
            HeldError: If another job owns the directory and still runs; with `first`, if it may
                still run.
            OSError: If the lease cannot be read or written.
        """

        def refuse(owner: Owner) -> None:
            raise HeldError(owner)

        while True:
            number = _latest(self.directory)
            if self._is_free(number, refuse if first else on_wait) and self._create(number + 1):
                return

    def renew(self, state: str | None = None) -> None:
        """Extend the lease, or find out that another job owns the directory.

        Args:
            state: The state from now on; None keeps it.

        Raises:
            OSError: If the lease cannot be read or written; see `claim`.
        """
        with self._lock:
            if self._number is None or self._lost_to is not None:
                return
            start = self._clock()
            count = self._content.count + 1
            self._content = replace(self._content, state=state or self._content.state, count=count)
            if (latest := _latest(self.directory)) > self._number:
                self._lose(latest)
            elif start < self._expires and self._overwrite(self._number, self._content):
                self._expires = start + self._content.seconds
            elif not self._create(self._number + 1):
                self._lose(_latest(self.directory))

    def check(self) -> None:
        """Check that this job owns the directory; reads the file only if the lease has expired.

        Raises:
            HeldError: If another job does.
            OSError: If the lease has expired and cannot be read; see `claim`.
        """
        if self._number is not None and not self.is_valid:
            self.renew()
        if self._lost_to is not None:
            raise HeldError(self._lost_to)

    def release(self) -> None:
        """Let the next job own the directory immediately.

        Raises:
            OSError: If the lease cannot be written; it expires then.
        """
        with self._lock:
            number, valid = self._number, self.is_valid
            # Before the write, after which another job may own the directory.
            self._number = None
            if number is not None and valid:
                self._overwrite(number, replace(self._content, state=RELEASED))

    def _is_free(self, number: int, on_wait: OnWait) -> bool:
        """Wait for the owner to end; return False if another one has replaced it."""
        seen, since = _read(self.directory, number), self._clock()
        while True:
            content = Content.decode(seen)
            if not number:
                return True
            if content is not None:
                if content.state == RELEASED or self._content.owner.replaces(content.owner):
                    return True
                on_wait(content.owner)
            seconds = self._content.seconds if content is None else content.seconds
            self._sleep(seconds / LOOKS)
            # Before the file is read: the owner may renew it until then, see Note [Two owners].
            expired = self._clock() - since >= seconds
            if _latest(self.directory) != number:
                return False
            now = _read(self.directory, number)
            if now == seen:
                if expired:
                    return True
                continue
            renewed = Content.decode(now)
            if content is not None and renewed is not None and renewed.state == RUNNING:
                raise HeldError(renewed.owner)
            seen, since = now, self._clock()

    def _create(self, number: int) -> bool:
        """Try to create the lease of a number; return whether this job owns the directory now."""
        start = self._clock()
        path, data = _path(self.directory, number), self._content.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        created = False
        try:
            with path.open("xb") as file:
                created = True
                file.write(data)
        except FileExistsError:
            return False
        except OSError:
            if created:  # an incomplete lease counts, but has no owner
                path.unlink(missing_ok=True)
            raise
        numbers = _numbers(self.directory)
        if max(numbers, default=0) != number:
            return False
        self._number, self._expires = number, start + self._content.seconds
        for older in {*numbers} - {number}:
            _path(self.directory, older).unlink(missing_ok=True)
        return True

    def _overwrite(self, number: int, content: Content) -> bool:
        """Write this job's file; return whether the write ended before the lease expired."""
        path, data = _path(self.directory, number), content.encode()
        try:
            with path.open("r+b") as file:
                file.write(data)
        except FileNotFoundError:  # deleted with the directory, or by a later owner
            return False
        return self._clock() < self._expires

    def _lose(self, number: int) -> None:
        self._lost_to = _owner(self.directory, number) or replace(
            self._content.owner, job="", host="unknown"
        )


def last_owner(directory: Path) -> Owner | None:
    """Return the job that owns a directory or was the last to own it; None if that is not known."""
    try:
        return _owner(directory, _latest(directory))
    except OSError:
        return None


def _owner(directory: Path, number: int) -> Owner | None:
    content = Content.decode(_read(directory, number))
    return None if content is None else content.owner


def _read(directory: Path, number: int) -> bytes:
    try:
        return _path(directory, number).read_bytes()
    except FileNotFoundError:
        return b""


def _path(directory: Path, number: int) -> Path:
    return directory / f"lease-{number:06d}.json"


def _latest(directory: Path) -> int:
    return max(_numbers(directory), default=0)


def _numbers(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    names = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return [int(name[1]) for name in names if name]
