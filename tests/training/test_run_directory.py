from __future__ import annotations

from pathlib import Path

import pytest

from distmp.errors import ConfigError
from distmp.training.run_directory import (
    RunDirectory,
    append_start,
    check_saves,
    create_run,
    existing_runs,
    latest_of,
)
from tests.disks import disk


def latest_run(run_dir: str, checkpoint_path: str | None = None) -> RunDirectory | None:
    """Return the directory that `resume: auto` continues; None without any."""
    runs = existing_runs(run_dir, checkpoint_path)
    return latest_of(runs) if runs else None


def test_too_long_directory_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read \\(File name too long\\)"):
        latest_run(str(tmp_path / (300 * "x")))


def test_run_directory_has_expected_paths(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert {run.config, run.records, run.checkpoints} == {
        tmp_path / name for name in ("config.yaml", "steps.jsonl", "checkpoints")
    }


@pytest.mark.parametrize("name", ["run", "deep/er/run", "run/", "run-x", "[run]", "run*", "r.1"])
def test_each_run_gets_its_own_directory(tmp_path: Path, name: str) -> None:
    wanted = f"{tmp_path}/{name}"
    first = Path(wanted)
    assert latest_run(wanted) is None
    for number in range(1, 13):
        expected = first if number == 1 else first.with_name(f"{first.name}-{number}")
        assert create_run(wanted).path == expected
        assert expected.is_dir()
        newest = latest_run(wanted)
        assert newest is not None
        assert newest.path == expected


def test_relative_paths_are_absolute_before_a_callback_changes_the_directory(cwd: Path) -> None:
    runs = [create_run("runs/a", "scratch") for _ in range(2)]
    assert [run.path for run in runs] == [cwd / "runs/a", cwd / "runs/a-2"]
    assert runs[0].checkpoints == cwd / "scratch/a"
    newest = latest_run("runs/a")
    assert newest is not None
    assert newest.path == cwd / "runs/a-2"


def test_files_and_other_names_are_not_runs(tmp_path: Path) -> None:
    wanted = str(tmp_path / "run")
    create_run(wanted)
    (tmp_path / "run-7").write_text("a file")
    for other in ("run-old", "run-2b", "run-", "runs-9", "run-8-9", "run-01"):
        (tmp_path / other).mkdir()
    newest = latest_run(wanted)
    assert newest is not None
    assert newest.path == Path(wanted)


def test_numbered_name_of_another_experiment_is_not_a_run(tmp_path: Path) -> None:
    first, second = (create_run(str(tmp_path / "lr")) for _ in range(2))
    other = create_run(str(tmp_path / "lr-3"))
    for run, wanted in ((first, "runs/lr"), (second, "runs/lr"), (other, "runs/lr-3")):
        append_start(run.manifest, {"configuration": {"run_dir": wanted}})
    # Its own name continues a run that was created for another one.
    append_start(second.manifest, {"configuration": {"run_dir": "runs/lr-2"}})
    assert [run.path.name for run in existing_runs(str(tmp_path / "lr"))] == ["lr", "lr-2"]
    assert create_run(str(tmp_path / "lr")).path == tmp_path / "lr-4"


def test_file_with_name_of_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"^run_dir = '.*run': is a file; name a directory$"):
        create_run(str(tmp_path / "run"))


def test_file_with_numbered_name_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run-2").write_text("a file")
    assert create_run(str(tmp_path / "run")).path == tmp_path / "run-3"


def test_uncreatable_directory_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run_dir = '.*/run': cannot be created \(Not a dir"):
        create_run(str(tmp_path / "file" / "run"))


def test_checkpoints_are_stored_in_other_directory(tmp_path: Path) -> None:
    place, wanted = str(tmp_path / "scratch"), str(tmp_path / "run")
    assert latest_run(wanted, place) is None
    first = create_run(wanted, place)
    assert first.checkpoints == tmp_path / "scratch" / "run"
    assert first.owns(tmp_path / "scratch" / "run" / "step-000001")
    assert not first.owns(tmp_path / "run" / "checkpoints" / "step-000001")
    assert create_run(wanted, place).checkpoints == tmp_path / "scratch" / "run-2"


def test_run_with_remote_directory_is_found(tmp_path: Path) -> None:
    place, wanted = tmp_path / "scratch", str(tmp_path / "here" / "run")
    for name in ("run", "run-3", "other", "run-x"):
        (place / name).mkdir(parents=True)
    newest = latest_run(wanted, str(place))
    assert newest is not None
    assert newest.path == Path(f"{wanted}-3")
    assert newest.checkpoints == place / "run-3"
    assert [create_run(wanted, str(place)).path.name for _ in range(2)] == ["run-2", "run-4"]


def test_unwritable_checkpoint_path_is_refused_at_start(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    with disk(tmp_path / "disk", "size=1m,ro") as read_only:
        for path in (tmp_path / "file" / "run", read_only / "run", read_only):
            with pytest.raises(ConfigError, match=": cannot be written to") as error:
                check_saves(path)
            assert str(error.value).startswith(f"checkpoint.path = {str(path.parent)!r}: ")
    check_saves(tmp_path / "new" / "run")
    assert (tmp_path / "new" / "run").is_dir()


def test_unreadable_checkpoint_path_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^checkpoint\.path = 'nothing://x': is a URL; name a"):
        latest_run(str(tmp_path / "run"), "nothing://x")
