from __future__ import annotations

from pathlib import Path

import pytest

from distmp import cli
from distmp.config import load
from distmp.errors import ConfigError
from distmp.models import huggingface
from distmp.utils.files import MODEL, located, preset_directory, preset_names, preset_purpose

CONFIGS = Path(__file__).parents[2] / "configs"


def test_configs_directory_provides_presets() -> None:
    assert preset_directory() == CONFIGS
    assert preset_names() == sorted(file.stem for file in CONFIGS.glob("*.yaml"))
    assert "quickstart" in preset_names()
    assert preset_names(MODEL) == ["llama-tiny"]


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.usefixtures("cwd")
def test_preset_agrees_with_its_file(name: str) -> None:
    preset = load(["--config", f"preset:{name}", "--seed", "3"])
    assert preset == load(["--seed=3", f"--config={CONFIGS / name}.yaml"])
    assert preset.seed == 3


@pytest.mark.parametrize("name", preset_names())
def test_first_line_of_preset_states_purpose(name: str) -> None:
    purpose = preset_purpose(name)
    assert purpose[0].isupper()
    assert purpose.endswith(".")
    assert len(purpose) <= 85


def test_command_lists_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["presets"]) == 0
    *lines, _, use, directory = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"preset:{name}" for name in preset_names()]
    assert all(
        preset_purpose(name) in line for name, line in zip(preset_names(), lines, strict=True)
    )
    assert "--config preset:NAME" in use
    assert Path(directory) == CONFIGS
    assert cli.main(["presets", "quickstart"]) == 2


@pytest.mark.parametrize("unknown", ["quickstrat", "../configs/quickstart", "llama-tiny", ""])
def test_unknown_preset_is_refused(unknown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--config", f"preset:{unknown}"]) == 2
    message = capsys.readouterr().err
    assert f"--config = 'preset:{unknown}': there is no such preset;" in message
    assert "quickstart" in message


def test_unknown_model_preset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.name = 'preset:lama.*did you mean 'llama-tiny'"):
        huggingface.locate("hf:preset:lama-tiny")


@pytest.mark.parametrize("path", ["quickstart", "configs/quickstart.yaml", "quickstart.yaml"])
def test_preset_name_without_prefix_is_suggested(path: str, cwd: Path) -> None:
    with pytest.raises(ConfigError, match=f"'{path}': .* did you mean 'preset:quickstart'"):
        load(["--config", path])
    (cwd / path).parent.mkdir(exist_ok=True)
    (cwd / path).write_text("seed: 7")
    assert load(["--config", path]).seed == 7


def test_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be read \(File name too long"):
        load(["--config", 5000 * "x"])


def test_other_paths_are_unchanged() -> None:
    assert located("--config", "x/preset:quickstart") == "x/preset:quickstart"
