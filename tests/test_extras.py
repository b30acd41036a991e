"""What needs a package of an extra says in one message which extra installs it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from distmp import cli

PROJECT = (Path(__file__).parent.parent / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("matplotlib", "report", ["report", "runs/any"]),
        ("accelerate", "trackers", ["explain", "--log.trackers", "tensorboard"]),
        ("transformers", "hf", ["explain", "--config", "preset:huggingface"]),
        ("peft", "hf", ["explain", "--model.peft={r: 4}"]),
        ("datasets", "data", ["data", "tokenize", "any", "--to=any", "--tokenizer=bytes"]),
    ],
)
def test_command_names_extra_of_missing_package(
    package: str,
    extra: str,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what `import` and `find_spec` see
    assert cli.main(arguments) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "RUN_DIR" not in message
    assert message.endswith(f"needs {package}; run pip install 'distmp[{extra}]'")
    (installed,) = re.findall(rf"^{extra} = (\[.*\])$", PROJECT, re.MULTILINE)
    assert f'"{package}>=' in installed


def test_integration_names_extra_of_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "distmp.integrations.accelerate", raising=False)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ImportError, match=r"needs accelerate; run pip install 'distmp\[hf\]'"):
        import distmp.integrations.accelerate  # noqa: F401
