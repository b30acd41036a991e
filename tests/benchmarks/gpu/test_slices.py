from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from benchmarks.figures import ROOT
from benchmarks.gpu.slices import SLICE_SECONDS, slices

ALL = slices("350m", "1.3b", Path("out"))


def test_the_limits_of_a_slice_add_up_to_nine_minutes_at_most() -> None:
    assert SLICE_SECONDS == 9 * 60
    for part in ALL:
        assert 0 < sum(job.limit for job in part.jobs) <= SLICE_SECONDS, part.title


def test_three_slices_fit_into_half_an_hour_with_the_larger_model() -> None:
    assert ALL[2].jobs[-1].name == "peers_large"
    assert 3 * SLICE_SECONDS < 30 * 60


def test_all_jobs_exist() -> None:
    jobs = [job for part in ALL for job in part.jobs]
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        assert find_spec(job.arguments[0]), job.name
        timeouts = [float(text[10:]) for text in job.arguments if text.startswith("--timeout=")]
        assert len(timeouts) == job.has_tests, job.name
        assert all(1 < timeout < job.limit for timeout in timeouts), "one test may take all of it"
    assert ALL[1].jobs[0].arguments[-1] == "tests"  # all of them


def test_the_first_slice_takes_two_minutes_and_has_all_tests_of_a_real_device() -> None:
    assert sum(job.limit for job in ALL[0].jobs) <= 120
    directories = [Path(text) for text in ALL[0].jobs[0].arguments if text.startswith("tests/")]
    marked = [
        path.relative_to(ROOT)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.real_gpu" in path.read_text() and path != Path(__file__)
    ]
    assert len(marked) > 5
    for path in marked:
        assert any(directory in path.parents for directory in directories), path


def test_the_larger_model_is_omitted() -> None:
    without = slices("350m", None, Path("out"))
    assert [job.name for job in without[2].jobs] == ["peers"]
    assert without[:2] + without[3:] == ALL[:2] + ALL[3:]
