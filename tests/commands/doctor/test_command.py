from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distmp.commands.doctor import command, machine_info
from distmp.commands.doctor.checks import CHECKS
from distmp.commands.doctor.machine_info import Folder
from distmp.errors import ConfigError
from tests.commands.doctor.test_checks import HEALTHY


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [f"--run-dir={tmp_path}", "--precision.policy=bf16", "--strategy=single", "--json"]
    code = command.main(arguments)
    output = json.loads(capsys.readouterr().out)
    assert {result["check"] for result in output["results"]} >= CHECKS.keys() - {"GPUs"}
    assert code == any(result["status"] == "FAIL" for result in output["results"])
    assert output["machine"]["policy"].startswith("bf16 (configured")
    assert output["machine"]["strategy"] == "single on 1 rank (as configured)"
    assert output["machine"]["folder"]["path"] == str(tmp_path)


def test_exit_code_and_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_info, "gather", lambda *_: HEALTHY)
    assert command.main([]) == 0
    assert capsys.readouterr().out.count("\n") == len(CHECKS)
    # A warning is no failure.
    monkeypatch.setattr(machine_info, "gather", lambda *_: replace(HEALTHY, addresses=()))
    assert command.main([]) == 0
    assert "WARN  hostname" in capsys.readouterr().out
    full = replace(HEALTHY, folder=Folder("/runs", 0, None))
    monkeypatch.setattr(machine_info, "gather", lambda *_: full)
    assert command.main([]) == 1
    lines = capsys.readouterr().out.splitlines()
    failed = next(n for n, line in enumerate(lines) if line.startswith("FAIL  disk"))
    assert "-> free space" in lines[failed + 1]


def test_an_invalid_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        command.main(["--strategy=dpp"])
