from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from distmp import __version__, cli
from distmp.errors import CheckpointError, ConfigError
from tests.progress import wait_until
from tests.torchrun import environment, python, run

# A replacement for torch whose import does not end.
# Sleeps repeatedly: a signal just before a sleep is handled after it.
TORCH = """\
import pathlib, time
pathlib.Path('importing').touch()
while True:
    time.sleep(0.1)
"""


def subcommand(monkeypatch: pytest.MonkeyPatch, main: object) -> None:
    """Make `distmp train` run `main`."""
    module = types.ModuleType("distmp.train")
    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distmp.train", module)


def raising(error: BaseException) -> Callable[[list[str]], int]:
    def main(argv: list[str]) -> int:
        raise error

    return main


def test_subcommand_gets_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def main(argv: list[str]) -> int:
        seen.append(argv)
        return 7

    subcommand(monkeypatch, main)
    assert cli.main(["train", "--config", "x.yaml"]) == 7
    assert seen == [["--config", "x.yaml"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("optim.lr", -1, "must be positive"), 2),
        (CheckpointError("the disk is full"), 1),
    ],
)
def test_user_errors_are_one_message(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subcommand(monkeypatch, raising(error))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == f"distmp train: {error}\n"


def test_other_errors_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    subcommand(monkeypatch, raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_interrupt_returns_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    subcommand(monkeypatch, raising(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130


@pytest.mark.parametrize("arguments", [("train", "--help"), ("launch", "--", "--help")])
def test_closed_pipe_gives_no_traceback(arguments: tuple[str, ...]) -> None:
    """`distmp train --help | head -1` ends without a traceback."""
    read, write = os.pipe()
    os.close(read)
    try:
        finished = subprocess.run(
            [sys.executable, "-m", "distmp", *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(write)
    assert finished.stderr == ""
    assert finished.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("closed", ["<&- >&-", ">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_replaced(closed: str) -> None:
    program = (
        "import os; from distmp.telemetry.console import open_standard_streams;"
        "open_standard_streams(); print('text', flush=True); os.write(2, b'error');"
        "assert os.open(os.devnull, 0) > 2; os.system('echo text')"
    )
    script = f'"$0" -c "$1" {closed}'
    arguments = ["sh", "-c", script, sys.executable, program]
    finished = subprocess.run(arguments, capture_output=True, text=True)
    out = "" if " >&-" in f" {closed}" else "text\ntext\n"
    err = "" if "2>&-" in closed else "error"
    assert (finished.returncode, finished.stdout, finished.stderr) == (0, out, err)


def test_command_runs_without_output() -> None:
    script = '"$0" -m distmp presets >&- 2>&-'
    assert subprocess.run(["sh", "-c", script, sys.executable]).returncode == 0


@pytest.mark.parametrize("argument", ["--help", "presets"])
def test_full_output_device_is_one_message(argument: str) -> None:
    with open("/dev/full", "w") as full:
        finished = subprocess.run(
            [sys.executable, "-m", "distmp", argument],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    message = "distmp: the output cannot be written (No space left on device)\n"
    assert (finished.returncode, finished.stderr) == (1, message)


@pytest.mark.parametrize(
    ("name", "number", "code"),
    [
        ("launch", signal.SIGTERM, 75),
        ("launch", signal.SIGUSR1, 75),
        ("launch", signal.SIGINT, 130),
        ("train", signal.SIGUSR2, 75),
        pytest.param("doctor", signal.SIGTERM, -signal.SIGTERM, id="no job of a scheduler"),
    ],
)
def test_signal_during_imports_gives_no_traceback(
    name: str, number: signal.Signals, code: int, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    process = subprocess.Popen(
        python("-m", "distmp", name), cwd=tmp_path, env=environment(), stderr=subprocess.PIPE
    )
    with process:
        importing = tmp_path / "importing"
        wait_until(lambda: process.poll() is not None or importing.exists())
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == code
    message = f"distmp: stopped by {number.name} before anything had begun (exit code {code})\n"
    assert err.decode() == (message if code > 0 else "")


@pytest.mark.parametrize("name", ["trian", "Train", "lunch", "--verison", "xyzzy"])
def test_unknown_subcommand_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 2
    message = capsys.readouterr().err
    assert repr(name) in message
    assert "train" in message or "launch" in message


def test_help_lists_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli._SUBCOMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", cli._SUBCOMMANDS)
def test_every_subcommand_exists(name: str) -> None:
    module = importlib.import_module(cli._SUBCOMMANDS[name][0])
    assert callable(module.main)


def test_module_runs_like_command() -> None:
    finished = run(python("-m", "distmp", "--version"), Path.cwd())
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith(f"distmp {__version__}, torch ")
