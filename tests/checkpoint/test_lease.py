"""Leases on directories; a virtual clock, and jobs that are paused between any two operations."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from distmp.checkpoint import lease as leases
from distmp.checkpoint.lease import Content, HeldError, Lease, Owner
from distmp.utils.processes import ProcessIdentity

ELSEWHERE = ProcessIdentity("another machine", 1, "1")


def owner(job: str, **changes: Any) -> Owner:
    """Return a job whose process cannot be looked up here."""
    process = ELSEWHERE._replace(started=job)
    return replace(Owner(job, f"host of {job}", process), **changes)


class Clock:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.events if event[0] <= self.now]
        self.events = [event for event in self.events if event not in due]
        for _, event in due:
            event()

    def every(self, seconds: float, event: Callable[[], object]) -> None:
        def again() -> None:
            event()
            self.events.append((self.now + seconds, again))

        self.events.append((self.now + seconds, again))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def lease(directory: Path, job: str, clock: Clock, **changes: Any) -> Lease:
    made = Lease(directory, owner(job, **changes))
    made._clock, made._sleep = clock, clock.sleep
    return made


def pair(directory: Path) -> tuple[Clock, Lease, Lease]:
    clock = Clock()
    return clock, lease(directory, "a", clock), lease(directory, "b", clock)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_released_directory_is_taken_immediately(directory: Path) -> None:
    clock, first, second = pair(directory)
    first.claim(pytest.fail)
    assert first.is_valid
    assert files(directory) == ["lease-000001.json"]
    first.release()
    assert not first.is_valid
    second.claim(pytest.fail)
    assert second.is_valid
    assert files(directory) == ["lease-000002.json"]
    assert clock.now == 0
    found = leases.last_owner(directory)
    assert found is not None
    assert found.job == "b"


def test_running_job_keeps_its_directory(directory: Path) -> None:
    waited_for: list[Owner] = []
    clock, first, second = pair(directory)
    first.claim()
    clock.every(leases.SECONDS / leases.RENEWALS, first.renew)
    with pytest.raises(HeldError, match="owned by process 1 on host of a"):
        second.claim(waited_for.append)
    assert {found.job for found in waited_for} == {"a"}
    assert clock.now < leases.SECONDS / 2
    assert first.is_valid
    assert not second.is_valid


def test_silent_job_loses_its_directory(directory: Path) -> None:
    waited_for: list[Owner] = []
    clock, first, second = pair(directory)
    first.claim()
    second.claim(waited_for.append)
    assert leases.SECONDS <= clock.now < 1.2 * leases.SECONDS
    assert {found.job for found in waited_for} == {"a"}
    with pytest.raises(HeldError, match="owned by process 1 on host of b"):
        first.check()
    first.renew()
    first.release()
    second.check()
    assert second.is_valid


def test_ending_job_is_waited_for(directory: Path) -> None:
    clock, first, second = pair(directory)
    first.claim()
    first.renew(leases.ENDING)
    clock.every(leases.SECONDS / leases.RENEWALS, first.renew)
    clock.events.append((95.0, first.release))
    second.claim()
    assert 95 <= clock.now < 100


def test_stopped_job_without_successor_continues(directory: Path) -> None:
    clock = Clock()
    first = lease(directory, "a", clock)
    first.claim()
    clock.sleep(1000)
    assert not first.is_valid
    first.check()
    assert first.is_valid
    assert files(directory) == ["lease-000002.json"]


def test_replacement_depends_on_process_and_scheduler_job(tmp_path: Path) -> None:
    here = ProcessIdentity.of_this_process()
    job = owner("a", process=here, scheduler="7", requeues=1)
    assert job.replaces(owner("a"))
    assert job.replaces(owner("b", process=here))
    assert not job.replaces(owner("b"))
    assert not job.replaces(owner("b", process=here._replace(pid=os.getppid(), started=parent())))
    assert job.replaces(owner("b", process=here._replace(started="0")))
    assert not job.replaces(owner("b", process=here._replace(machine="x", started="0")))
    assert job.replaces(owner("b", scheduler="7", requeues=0))
    # Two steps of one allocation, and another job.
    assert not job.replaces(owner("b", scheduler="7", requeues=1))
    assert not job.replaces(owner("b", scheduler="8", requeues=0))
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    zombie = here._replace(pid=child)
    assert zombie.has_ended()
    os.waitpid(child, 0)


def parent() -> str:
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    return stat.rpartition(")")[2].split()[19]


def test_incomplete_lease_file_counts_as_owned(tmp_path: Path) -> None:
    (tmp_path / "lease-000004.json").write_bytes(b"")
    clock = Clock()
    second = lease(tmp_path, "b", clock)
    second.claim(pytest.fail)
    assert clock.now >= leases.SECONDS
    assert files(tmp_path) == ["lease-000005.json"]


def test_lease_that_cannot_be_written_is_removed(directory: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lease(directory, "a", Clock()).claim()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert files(directory) == []


def test_lease_content_round_trips(tmp_path: Path) -> None:
    here = ProcessIdentity.of_this_process()
    content = Content(Owner("a", "host", here, "1_2", 3), "ending", 4, 5.0)
    assert Content.decode(content.encode()) == content
    for damaged in (b"", b"{", b"[]", b'{"owner": 3}', content.encode()[:100]):
        assert Content.decode(damaged) is None


def test_deleted_directory_is_claimed_again(tmp_path: Path) -> None:
    clock = Clock()
    first = lease(tmp_path / "run", "a", clock)
    first.claim()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    first.renew()
    assert first.is_valid
    assert files(tmp_path / "run") == ["lease-000002.json"]


def test_first_owner_does_not_wait_for_another(directory: Path) -> None:
    _, first, second = pair(directory)
    first.claim(first=True)
    with pytest.raises(HeldError, match="host of a"):
        second.claim(first=True)
    first.release()
    second.claim(first=True)
    assert second.is_valid


# Every interleaving

# More operations than an action has, except for a job that waits: it has begun to watch.
WHOLE = 20


class SharedPath:
    """A path on shared storage: operations are atomic, with a pause after each."""

    def __init__(
        self, content: dict[str, bytes], pause: Callable[[str], None], name: str = "run"
    ) -> None:
        self._content = content
        self._pause = pause
        self.name = name

    def __truediv__(self, name: str) -> SharedPath:
        return SharedPath(self._content, self._pause, name)

    @property
    def parent(self) -> SharedPath:
        return self

    def mkdir(self, parents: bool, exist_ok: bool) -> None:
        self._pause("mkdir")

    def is_dir(self) -> bool:
        return True

    def iterdir(self) -> Iterator[SharedPath]:
        names = list(self._content)
        self._pause("list")
        return iter([self / name for name in names])

    def read_bytes(self) -> bytes:
        data = self._content.get(self.name)
        self._pause("read")
        if data is None:
            raise FileNotFoundError(self.name)
        return data

    @contextlib.contextmanager
    def open(self, mode: str) -> Iterator[SharedPath]:
        if mode == "xb" and self.name in self._content:
            raise FileExistsError(self.name)
        if mode == "r+b" and self.name not in self._content:
            raise FileNotFoundError(self.name)
        yield self
        self._pause("create" if mode == "xb" else "overwrite")

    def write(self, data: bytes) -> None:
        self._content[self.name] = data

    def unlink(self, missing_ok: bool) -> None:
        self._content.pop(self.name, None)
        self._pause("unlink")


class Killed(BaseException):
    """The process ends here."""


class Process:
    """A job whose actions run in a thread, from one pause to the next.

    A pause follows each operation on a file, each look at the clock, and each sleep, which may take
    any time.

    Attributes:
        last: The last operation; "" between two actions.
    """

    def __init__(self, job: str, content: dict[str, bytes], now: Callable[[], float]) -> None:
        self.job = job
        self.last = ""
        directory: Any = SharedPath(content, self._pause)
        self.lease = Lease(directory, owner(job))
        self.lease._clock, self.lease._sleep = self._clock, self._sleep
        self._now = now
        self._thread: threading.Thread | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False

    @property
    def busy(self) -> bool:
        return self._thread is not None

    @property
    def owns(self) -> bool:
        return self.lease._number is not None and self.lease._lost_to is None

    def begin(self, action: str) -> None:
        def run() -> None:
            self._go.acquire()
            with contextlib.suppress(Killed, HeldError):
                getattr(self.lease, action)()
            self._thread, self.last = None, ""
            self._paused.release()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def go_on(self) -> None:
        """Do the next operation."""
        self._go.release()
        self._paused.acquire()

    def kill(self) -> None:
        self._killed = True
        if (thread := self._thread) is not None:
            self.go_on()
            thread.join()

    def _clock(self) -> float:
        now = self._now()
        self._pause("clock")
        return now

    def _sleep(self, seconds: float) -> None:
        self._pause("sleep")

    def _pause(self, operation: str) -> None:
        if threading.current_thread() is not self._thread:  # a look of the test
            return
        self.last = operation
        if not self._killed:
            self._paused.release()
            self._go.acquire()
        if self._killed:
            raise Killed


class Jobs:
    """Jobs that want one directory. Whatever happens, at most one may write to it."""

    def __init__(self, number: int) -> None:
        self.now = 0.0
        self._content: dict[str, bytes] = {}
        self._names = map(str, range(10000))
        self._dead: set[str] = set()
        self.jobs = [self._start() for _ in range(number)]
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(
            ProcessIdentity, "has_ended", lambda process: process.started in self._dead
        )

    def _start(self) -> Process:
        return Process(next(self._names), self._content, lambda: self.now)

    def close(self) -> None:
        for job in self.jobs:
            job.kill()
        self._patch.undo()

    def tick(self, thirds: int) -> None:
        self.now += thirds * leases.SECONDS / 3

    def kill(self, number: int) -> None:
        self.jobs[number].kill()
        self._dead.add(self.jobs[number].job)
        self.jobs[number] = self._start()

    def go_on(self, job: Process, steps: int, action: str = "") -> None:
        """Do some operations of an action; by default of the next claim or renewal."""
        if not job.busy:
            job.begin(action or ("renew" if job.owns else "claim"))
        for _ in range(steps):
            if job.busy:
                job.go_on()
                self.check()

    def until(self, job: Process, operation: str, action: str = "") -> None:
        """Go on until after an operation; "" for the end of the action."""
        for _ in range(100):
            self.go_on(job, 1, action)
            if job.last == operation:
                return
            assert job.busy
        raise AssertionError(f"waits for {operation!r}")

    def check(self) -> None:
        valid = [job.job for job in self.jobs if job.lease.is_valid]
        assert len(valid) <= 1, valid


Two = tuple[Jobs, Process, Process]


@pytest.fixture
def new() -> Iterator[Two]:
    """Two jobs that begin at time 0."""
    with contextlib.closing(Jobs(2)) as jobs:
        first, second = jobs.jobs
        yield jobs, first, second


@pytest.fixture
def two(new: Two) -> Two:
    """Two jobs: at time 0, the first one owns the directory, and the second one watches it."""
    jobs, first, second = new
    jobs.until(first, "")
    jobs.until(second, "sleep")
    return new


def test_write_after_lease_expiry_is_ignored(two: Two) -> None:
    jobs, first, second = two
    jobs.now = leases.SECONDS - 1
    jobs.until(first, "list")
    jobs.now = leases.SECONDS
    jobs.until(second, "")
    assert second.lease.is_valid
    jobs.until(first, "")


def test_renewal_time_starts_before_write(two: Two) -> None:
    jobs, first, second = two
    jobs.now = 10.0
    jobs.until(first, "overwrite")
    jobs.until(second, "")
    assert not second.owns
    jobs.until(second, "sleep")
    jobs.now = leases.SECONDS - 1
    jobs.until(first, "")
    jobs.now = leases.SECONDS + 9
    assert first.lease.is_valid
    jobs.now = leases.SECONDS + 10
    jobs.until(second, "")
    assert second.lease.is_valid


def test_new_lease_time_starts_before_write(new: Two) -> None:
    jobs, first, second = new
    jobs.until(first, "create")
    jobs.until(second, "sleep")
    jobs.now = leases.SECONDS - 1
    jobs.until(first, "")
    assert first.lease.is_valid
    jobs.now = leases.SECONDS
    jobs.until(second, "")
    assert second.lease.is_valid


def test_lease_renewed_after_read_is_not_taken(two: Two) -> None:
    jobs, first, second = two
    jobs.now = leases.SECONDS - 1
    jobs.until(second, "read")
    jobs.until(first, "")
    jobs.now = leases.SECONDS + 1
    jobs.until(second, "")
    assert first.lease.is_valid


def test_late_creation_of_older_number_is_ignored(new: Two) -> None:
    jobs, first, second = new
    jobs.until(second, "mkdir")  # before it creates number 1
    for action in ("claim", "release", "claim"):
        jobs.until(first, "", action)
    jobs.until(second, "create")
    jobs.go_on(second, 20)
    assert first.lease.is_valid


def test_job_owns_nothing_after_release(two: Two) -> None:
    jobs, first, second = two
    jobs.until(first, "overwrite", "release")
    jobs.until(second, "")
    assert second.lease.is_valid


# Thirds of a lease that pass between the parts of a schedule: none, or a whole lease.
THIRDS = [ticks for ticks in itertools.product(range(3), repeat=4) if sum(ticks) in (0, 3)]


@pytest.mark.nightly
@pytest.mark.parametrize("suspended", [0, 1], ids=["owner", "other"])
@pytest.mark.parametrize("owned", [False, True], ids=["new", "owned"])
def test_one_owner_after_suspension_at_any_operation(owned: bool, suspended: int) -> None:
    """All schedules in which one job stops, the other one acts, and both go on."""
    others = [("", ""), ("", "release", "")]
    for operations, actions, ticks in itertools.product(range(1, 11), others, THIRDS):
        with contextlib.closing(Jobs(2)) as jobs:
            if owned:
                jobs.until(jobs.jobs[0], "")
                jobs.go_on(jobs.jobs[1], WHOLE)
            stopped, other = jobs.jobs[suspended], jobs.jobs[1 - suspended]
            jobs.tick(ticks[0])
            jobs.go_on(stopped, operations)
            jobs.tick(ticks[1])
            for action in actions:
                jobs.go_on(other, WHOLE, action)
            for job, passed in zip((stopped, other), ticks[2:], strict=True):
                jobs.tick(passed)
                jobs.go_on(job, WHOLE)


JOBS = st.integers(0, 2)
STEPS = st.one_of(st.integers(1, 8), st.just(WHOLE))


class Interleavings(RuleBasedStateMachine):
    """Three jobs that want one directory, are paused at any operation, and are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Jobs(3)

    def teardown(self) -> None:
        self.jobs.close()

    @rule(number=JOBS, steps=STEPS, thirds=st.sampled_from([0, 0, 1, 1, 3]))
    def go_on(self, number: int, steps: int, thirds: int) -> None:
        self.jobs.tick(thirds)
        self.jobs.go_on(self.jobs.jobs[number], steps)

    @rule(number=JOBS, steps=STEPS)
    def release(self, number: int, steps: int) -> None:
        self.jobs.go_on(self.jobs.jobs[number], steps, "release")

    @rule(number=JOBS)
    def kill(self, number: int) -> None:
        self.jobs.kill(number)


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
