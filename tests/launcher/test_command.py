from __future__ import annotations

import os
import shlex
import socket

import pytest

from distmp import cli
from distmp.errors import ConfigError
from distmp.launcher import command, local
from distmp.launcher.network import AddressError
from tests.launcher.test_job import SRUN


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ([], [])),
        (["--nproc-per-node", "4"], (["--nproc-per-node", "4"], [])),
        (["--", "--config", "x"], ([], ["--config", "x"])),
        (["--standalone", "--", "--config", "x"], (["--standalone"], ["--config", "x"])),
        (["--", "a", "--", "b"], ([], ["a", "--", "b"])),
    ],
)
def test_arguments_are_split_at_separator(
    argv: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert command.split(argv) == expected


@pytest.mark.parametrize("argv", [["--config", "x.yaml"], ["--standalone", "--config=x.yaml"]])
def test_forgotten_separator_is_explained(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="write '--' before"):
        command.split(argv)


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if name.startswith(("PET_", "SLURM_", "OMPI_", "PMI", "SKYPILOT_", "JOB_")):
            monkeypatch.delenv(name)


def test_main_runs_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launch", lambda *arguments, **options: (*arguments, options))
    assert command.main(["--nnodes", "1", "--", "--seed", "2"]) == (
        ["--nnodes", "1"],
        "distmp.train",
        ["--seed", "2"],
        {"dry_run": False, "environment": None, "port": None},
    )
    # Options in any order.
    words = ["--port=5", "--nnodes", "1", "--dry-run", "--environment", "local", "--", "--seed=2"]
    assert command.main(words) == (
        ["--nnodes", "1"],
        "distmp.train",
        ["--seed=2"],
        {"dry_run": True, "environment": "local", "port": 5},
    )


@pytest.mark.parametrize("words", [["--port=x"], ["--port=0"], ["--environment=x"], ["--hosts"]])
def test_invalid_options_are_one_message(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="argument --"):
        command.main(words)


@pytest.mark.parametrize(
    ("ssh", "message"),
    [
        ("", "--ssh = '': name a command"),
        ("  ", "--ssh = '  ': name a command"),
        ("ssh 'x", "is not a command \\(No closing quotation\\)"),
    ],
)
def test_invalid_ssh_command_is_one_message(ssh: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        command.main(["--hosts=a,b", f"--ssh={ssh}"])


def test_environment_is_refused_with_hosts() -> None:
    with pytest.raises(ConfigError, match="--environment = 'slurm': has no effect with --hosts"):
        command.main(["--hosts=a,b", "--environment=slurm"])


def test_dry_run_prints_reasons_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "_run", lambda *_: pytest.fail("a rank was started"))
    before = dict(os.environ)
    words = ["--dry-run", "--nproc-per-node=3", "--max-restarts=1", "--", "--seed", "2"]
    assert command.main(words) == 0
    out = capsys.readouterr().out
    torchrun = "torchrun --standalone --local-addr=127.0.0.1 --nproc-per-node=3 --max-restarts=1"
    assert out.splitlines()[-1].endswith(f"{torchrun} -m distmp.train --seed 2")
    assert "#   --standalone" in out
    assert dict(os.environ) == before


def test_dry_run_checks_the_configuration() -> None:
    with pytest.raises(ConfigError, match="steps"):
        command.main(["--dry-run", "--", "--steps", "0"])


def test_invalid_configuration_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launch", lambda *_, **__: pytest.fail("a rank was started"))
    for words in (["--optim.lr", "-1"], ["--optim.name", "adamww"]):
        with pytest.raises(ConfigError, match=rf"optim\.{words[0][8:]} = "):
            command.main(["--", *words])


def test_dry_run_refuses_unresolvable_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SRUN, "SLURM_STEP_NODELIST": "no-[1-2].invalid"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AddressError, match=r"no-1\.invalid"):
        command.main(["--dry-run"])


def test_first_pod_that_is_pending_is_no_invalid_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Job files do not retry after exit code 2."""

    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("JOB_COMPLETION_INDEX", "1")
    monkeypatch.setenv("HOSTNAME", "run-1")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-conf=join_timeout=1"]
    assert cli.main(["launch", *options, "--"]) == 1
    assert "the name 'run-0' has no address here" in capsys.readouterr().err


def test_commands_of_hosts_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dry-run", "--hosts=127.0.0.1,localhost", "--ssh=no-ssh -F x", "--port=5"]
    assert command.main([*words, "--max-restarts=1", "--", "--seed", "2"]) == 0
    out = capsys.readouterr().out
    commands = [shlex.split(line) for line in out.splitlines() if line.startswith("no-ssh -F x ")]
    assert [words[-2] for words in commands] == ["127.0.0.1", "localhost"]
    assert "--rdzv-endpoint=127.0.0.1:5 " in out
    assert commands[0][-1].endswith(" --max-restarts=1 -- --seed 2")


def test_help_refers_to_torchrun_and_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "torchrun --help" in out
    assert "distmp train --help" in out
    for option in ("--dry-run", "--environment", "--hosts", "--port"):
        assert option in out
    assert "--follow-stdin" not in out
