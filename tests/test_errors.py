from __future__ import annotations

import pytest

from distmp.errors import (
    CheckpointError,
    ConfigError,
    DistmpError,
    SetupError,
    TrainingError,
    nearest,
)


def test_config_error_names_setting_value_and_remedy() -> None:
    error = ConfigError("optim.lr", "fast", "use a number")
    assert str(error) == "optim.lr = 'fast': use a number"
    assert (error.setting, error.value) == ("optim.lr", "fast")


@pytest.mark.parametrize(
    ("error", "builtin", "exit_code"),
    [
        (ConfigError("a", 1, "b"), ValueError, 2),
        (CheckpointError("a"), RuntimeError, 1),
        (TrainingError("a"), RuntimeError, 1),
        (SetupError({0: "a"}, 7), DistmpError, 7),
    ],
)
def test_errors_have_base_class_and_exit_code(
    error: DistmpError, builtin: type[Exception], exit_code: int
) -> None:
    assert isinstance(error, DistmpError)
    assert isinstance(error, builtin)
    assert error.exit_code == exit_code


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ({0: "no data"}, "no data"),
        ({0: "no data", 1: "no data"}, "no data"),
        ({3: "no data"}, "no data"),
        ({0: "no data", 2: "no disk", 3: "no data"}, "ranks 0, 3: no data; rank 2: no disk"),
    ],
)
def test_setup_error_groups_ranks_by_message(messages: dict[int, str], text: str) -> None:
    assert str(SetupError(messages, 1)) == text


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("cosin", ["linear", "cosine"], "did you mean 'cosine'?"),
        ("AdamW", ["adam", "adamw"], "did you mean 'adamw'?"),
        ("llamarmsnorm", ["LlamaRMSNorm", "norm"], "did you mean 'LlamaRMSNorm'?"),
        ("Lyer", ["layer", "Layer"], "did you mean 'Layer'?"),
        ("xyz", ["linear", "cosine"], "choose one of cosine, linear"),
        ("x", (), "choose one of "),
        ("adamw2", iter(["sgd", "adamw"]), "did you mean 'adamw'?"),
    ],
)
def test_nearest_choice_is_suggested(name: str, choices: list[str], expected: str) -> None:
    assert nearest(name, choices) == expected
