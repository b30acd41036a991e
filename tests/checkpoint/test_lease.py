"""Leases on folders, with a virtual clock and jobs that are paused between any two operations."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distmp.checkpoint import lease as leases
from distmp.checkpoint.lease import Content, HeldError, Lease, Owner, SchedulerJob
from distmp.checkpoint.location import Location, RemotePath, locate
from distmp.utils.processes import ProcessIdentity
from tests.checkpoint.objects import URL

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


@pytest.fixture(params=["disk", "memory", "objects"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A folder on a disk or on an object store."""
    urls = {"memory": f"memory://{uuid.uuid4().hex}/run", "objects": f"{URL}{tmp_path}/run"}
    if request.param in urls:
        return locate("checkpoint.path", urls[request.param])
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def lease(folder: Location, job: str, clock: Clock, **changes: Any) -> Lease:
    return Lease(folder, owner(job, **changes), clock=clock, sleep=clock.sleep)


def files(folder: Location) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_released_folder_is_taken_at_once(folder: Location) -> None:
    clock = Clock()
    first, second = (lease(folder, job, clock) for job in "ab")
    first.claim(pytest.fail)
    assert first.is_valid
    assert files(folder) == ["lease-000001.json"]
    first.release()
    assert not first.is_valid
    second.claim(pytest.fail)
    assert second.is_valid
    assert files(folder) == ["lease-000002.json"]
    assert clock.now <= 2 * leases.SETTLE_SECONDS
    found = leases.last_owner(folder)
    assert found is not None
    assert found.job == "b"


def test_a_job_that_goes_on_keeps_its_folder(folder: Location) -> None:
    clock, waited_for = Clock(), []
    first, second = (lease(folder, job, clock) for job in "ab")
    first.claim()
    clock.every(leases.SECONDS / leases.RENEWALS, first.renew)
    with pytest.raises(HeldError, match="owned by process 1 on host of a"):
        second.claim(waited_for.append)
    assert [found.job for found in waited_for] == ["a"]
    assert clock.now < leases.SECONDS / 2
    assert first.is_valid
    assert not second.is_valid


def test_a_job_that_says_nothing_any_more_loses_its_folder(folder: Location) -> None:
    clock, waited_for = Clock(), []
    first, second = (lease(folder, job, clock) for job in "ab")
    first.claim()
    second.claim(waited_for.append)
    assert leases.SECONDS <= clock.now < 1.2 * leases.SECONDS
    assert [found.job for found in waited_for] == ["a"]
    with pytest.raises(HeldError, match="owned by process 1 on host of b"):
        first.check()
    first.renew()
    first.release()
    second.check()
    assert second.is_valid


def test_a_job_that_ends_is_waited_for(folder: Location) -> None:
    clock = Clock()
    first, second = (lease(folder, job, clock) for job in "ab")
    first.claim()
    first.renew(leases.ENDING)
    clock.every(leases.SECONDS / leases.RENEWALS, first.renew)
    clock.events.append((95.0, first.release))
    second.claim()
    assert 95 <= clock.now < 100


def test_a_stopped_job_that_nobody_replaced_goes_on(folder: Location) -> None:
    clock = Clock()
    first = lease(folder, "a", clock)
    first.claim()
    clock.sleep(1000)
    assert not first.is_valid
    first.check()
    assert first.is_valid
    assert files(folder) == ["lease-000002.json"]


def test_who_replaces_whom(tmp_path: Path) -> None:
    here = ProcessIdentity.of_this_process()
    job = owner("a", process=here, scheduler=SchedulerJob("7", 1))
    assert job.replaces(owner("a"))
    assert job.replaces(owner("b", process=here))
    assert not job.replaces(owner("b"))
    assert not job.replaces(owner("b", process=here._replace(pid=os.getppid(), started=parent())))
    assert job.replaces(owner("b", process=here._replace(started="0")))
    assert not job.replaces(owner("b", process=here._replace(machine="x", started="0")))
    assert job.replaces(owner("b", scheduler=SchedulerJob("7", 0)))
    # Two steps of one allocation, and another job.
    assert not job.replaces(owner("b", scheduler=SchedulerJob("7", 1)))
    assert not job.replaces(owner("b", scheduler=SchedulerJob("8", 0)))
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


def test_a_file_that_is_being_written_belongs_to_somebody(tmp_path: Path) -> None:
    (tmp_path / "lease-000004.json").write_bytes(b"")
    clock = Clock()
    second = lease(tmp_path, "b", clock)
    second.claim(pytest.fail)
    assert clock.now >= leases.SECONDS
    assert files(tmp_path) == ["lease-000005.json"]


def test_content_is_kept(tmp_path: Path) -> None:
    here = ProcessIdentity.of_this_process()
    content = Content(Owner("a", "host", here, SchedulerJob("1_2", 3, "1")), "ending", 4, 5.0, 6.0)
    assert Content.decode(content.encode()) == content
    for damaged in (b"", b"{", b"[]", b'{"owner": 3}', content.encode()[:100]):
        assert Content.decode(damaged) is None


def test_a_deleted_folder_is_claimed_again(tmp_path: Path) -> None:
    clock = Clock()
    first = lease(tmp_path / "run", "a", clock)
    first.claim()
    for path in (tmp_path / "run").iterdir():
        path.unlink()
    (tmp_path / "run").rmdir()
    first.renew()
    assert first.is_valid
    assert files(tmp_path / "run") == ["lease-000002.json"]


def test_only_a_new_folder_has_a_first_owner(folder: Location) -> None:
    clock = Clock()
    first, second = (lease(folder, job, clock) for job in "ab")
    first.claim_first()
    with pytest.raises(HeldError, match="host of a"):
        second.claim_first()
    first.release()
    with pytest.raises(HeldError, match="host of a"):
        second.claim_first()


# Every interleaving


class Objects:
    """The file system of an object store, whose operations are atomic; `pause` is around each."""

    def __init__(self, content: dict[str, bytes], pause: Callable[[], None]) -> None:
        self._content = content
        self._pause = pause

    @contextlib.contextmanager
    def _step(self) -> Iterator[dict[str, bytes]]:
        self._pause()
        yield self._content
        self._pause()

    def invalidate_cache(self) -> None:
        """Nothing is cached."""

    def exists(self, path: str) -> bool:
        with self._step() as content:
            return path in content

    def isdir(self, path: str) -> bool:
        return True

    def ls(self, path: str, detail: bool) -> list[str]:
        with self._step() as content:
            return list(content)

    def cat_file(self, path: str) -> bytes:
        with self._step() as content:
            if path not in content:
                raise FileNotFoundError(path)
            return content[path]

    def pipe_file(self, path: str, data: bytes, mode: str = "overwrite") -> None:
        with self._step() as content:
            if mode == "create" and path in content:
                raise FileExistsError(path)
            content[path] = data

    def rm_file(self, path: str) -> None:
        with self._step() as content:
            content.pop(path, None)


class Killed(BaseException):
    """The process ends here."""


class Process:
    """A job whose actions run in a thread, from one pause to the next."""

    def __init__(self, job: str, content: dict[str, bytes], clock: Callable[[], float]) -> None:
        self.job = job
        folder = RemotePath(Objects(content, self._pause), "run", "objects://run")
        self.lease = Lease(folder, owner(job), clock=clock, sleep=lambda _: self._pause())
        self._thread: threading.Thread | None = None
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._killed = False

    @property
    def busy(self) -> bool:
        return self._thread is not None

    def begin(self, action: Callable[[], object]) -> None:
        def run() -> None:
            self._go.acquire()
            with contextlib.suppress(Killed, HeldError):
                action()
            self._thread = None
            self._paused.release()

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def go_on(self) -> None:
        if self.busy:
            self._go.release()
            self._paused.acquire()

    def kill(self) -> None:
        self._killed = True
        thread = self._thread
        self.go_on()
        if thread is not None:
            thread.join()

    def _pause(self) -> None:
        if not self._killed:
            self._paused.release()
            self._go.acquire()
        if self._killed:
            raise Killed


JOBS = st.integers(0, 2)


class Interleavings(RuleBasedStateMachine):
    """Three jobs that want one folder, are paused at any operation, and are killed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.content: dict[str, bytes] = {}
        self.names = map(str, range(1000))
        self.dead: set[str] = set()
        self.jobs = [self._start() for _ in range(3)]
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(
            ProcessIdentity, "has_ended", lambda process: process.started in self.dead
        )

    def _start(self) -> Process:
        return Process(next(self.names), self.content, lambda: self.now)

    def teardown(self) -> None:
        for job in self.jobs:
            job.kill()
        self._patch.undo()

    @rule(number=JOBS, action=st.sampled_from(["claim", "renew", "check", "release"]))
    def begin(self, number: int, action: str) -> None:
        job = self.jobs[number]
        if not job.busy:
            if action == "claim" and job.lease._number is not None:
                action = "renew"
            job.begin(getattr(job.lease, action))

    @rule(number=JOBS, steps=st.integers(1, 8))
    def go_on(self, number: int, steps: int) -> None:
        for _ in range(steps):
            self.jobs[number].go_on()
            self.at_most_one_owner()

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0, 16.0, 29.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(number=JOBS, action=st.sampled_from(["claim", "claim", "renew", "release"]))
    def alone(self, number: int, action: str) -> None:
        """The other jobs hang until this one is done."""
        self.begin(number, action)
        for _ in range(1000):
            if not self.jobs[number].busy:
                break
            self.now += 0.25
            self.jobs[number].go_on()
            self.at_most_one_owner()
        assert not self.jobs[number].busy

    @rule(number=JOBS)
    def kill(self, number: int) -> None:
        self.jobs[number].kill()
        self.dead.add(self.jobs[number].job)
        self.jobs[number] = self._start()

    @invariant()
    def at_most_one_owner(self) -> None:
        valid = [job.job for job in self.jobs if job.lease.is_valid]
        assert len(valid) <= 1, valid


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)
