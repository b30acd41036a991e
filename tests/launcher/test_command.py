from __future__ import annotations

import pytest

from distmp.errors import ConfigError
from distmp.launcher import command


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
def test_split(argv: list[str], expected: tuple[list[str], list[str]]) -> None:
    assert command.split(argv) == expected


@pytest.mark.parametrize("argv", [["--config", "x.yaml"], ["--standalone", "--config=x.yaml"]])
def test_forgotten_separator_is_explained(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="write '--' before"):
        command.split(argv)


def test_main_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "launch", lambda *arguments: arguments)
    assert command.main(["--nnodes", "1", "--", "--seed", "2"]) == (
        ["--nnodes", "1"],
        ["--seed", "2"],
    )


def test_help_names_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "torchrun --help" in out
    assert "distmp train --help" in out
