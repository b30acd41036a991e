"""Settings in YAML, mappings and command lines."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.utils.settings import digest, flat, from_mapping
from distmp.utils.settings.command_line import command_line
from distmp.utils.settings.yaml_files import read_yaml, write_yaml


@dataclass(frozen=True)
class Schedule:
    warmup_steps: int = 10
    """Steps of linear warm-up."""
    kind: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay."""


@dataclass(frozen=True)
class Optim:
    lr: float = 1e-3
    """Learning rate at its peak."""
    betas: tuple[float, ...] = (0.9, 0.95)
    """Decay rates of the moments."""
    fused: bool = True
    """Step with one kernel."""
    clip: float | None = 1.0
    """Largest gradient norm."""
    schedule: Schedule = field(default_factory=Schedule)
    """Learning rate over time."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError("optim.lr", self.lr, "must be positive")


@dataclass(frozen=True)
class Data:
    path: str = ""
    """Directory of text files."""
    name: str | None = None
    """Name in the report."""
    columns: tuple[str, ...] = ()
    """Columns to read."""
    size: tuple[int, int] = (1, 2)
    """Height and width."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the dataset."""


@dataclass(frozen=True)
class Run:
    optim: Optim = field(default_factory=Optim)
    """The optimizer."""
    data: Data = field(default_factory=Data)
    """The data."""
    steps: int = 100
    """Updates to apply."""
    loss_scale: float | Literal["dynamic"] | None = "dynamic"
    """Scale of the loss."""

    def __post_init__(self) -> None:
        if self.steps < self.optim.schedule.warmup_steps:
            raise ConfigError("steps", self.steps, "must not be less than the warm-up")


def file_of(directory: Path, text: str) -> Path:
    path = directory / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def cli(*argv: str) -> Run:
    return command_line(Run, argv, "distmp train", "Train.")


# Aliases of aliases, which stand for a million values.
ALIASES = "a: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 6)
)


# --- YAML ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3e-4", 3e-4),
        ("3E4", 3e4),
        ("1e+5", 1e5),
        ("-2.5e-08", -2.5e-08),
        ("1.", 1.0),
        (".5", 0.5),
        ("1_000", 1000),
        ("-7", -7),
        ("+7", 7),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        # YAML 1.1 reads these as booleans, ninety minutes and a date.
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("0x", "0x"),
        ("'3e-4'", "3e-4"),
        ("'true'", "true"),
    ],
)
def test_yaml_scalars_have_expected_types(text: str, expected: object, tmp_path: Path) -> None:
    value = read_yaml(file_of(tmp_path, f"x: {text}\n"))["x"]
    assert value == expected
    assert type(value) is type(expected)


@given(value=st.floats(allow_nan=False))
def test_floats_round_trip_through_yaml(
    value: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = repr(value).replace("inf", ".inf")
    assert read_yaml(file_of(tmp_path_factory.getbasetemp(), f"x: {text}"))["x"] == value


@pytest.mark.parametrize("text", ["", "\n", "# nothing yet\n", "---\n"])
def test_empty_file_has_no_settings(text: str, tmp_path: Path) -> None:
    assert read_yaml(file_of(tmp_path, text)) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps: 1\nsteps: 2\n", "line 2, column 1: the key 'steps' is given twice"),
        ("optim:\n  lr: 1\n  lr: 2\n", "line 3, column 3: the key 'lr' is given twice"),
        ("a: {x: 1, x: 2}", "line 1, column 11: the key 'x' is given twice"),
        ("a: [1, 2\n", "line 2, column 1:"),
        (
            "a: 1\n  b: 2\n",
            "line 2, column 4: mapping values are not allowed here; check the indentation",
        ),
        ("a:\tb", "line 1, column 3: found character"),
        ("a: *missing", "line 1, column 4:"),
        ("a: !!python/object:os.system x", "line 1, column 4:"),
        ("a: !!int x", "is not valid YAML"),
        ("a: !!bool x", "is not valid YAML"),
        ("a: !!timestamp x", "is not valid YAML"),
        ("? [a, {b: c}]\n: 1", "line 1, column 3:"),
        ("a: 1\n---\nb: 2", "line 2, column 1:"),
        ("a: \x00", "is not valid YAML"),
        ("- a\n- b", "must hold settings"),
        ("just text", "must hold settings"),
        ("3", "must hold settings"),
        ("[" * 5000, "is not valid YAML"),
        ("a: " + "9" * 5000, "is not valid YAML"),
        ("a: &a [*a]", "is not valid YAML: maximum recursion depth"),
        ("a: &a {b: *a}", "is not valid YAML: maximum recursion depth"),
        (ALIASES, "is not valid YAML: more than 100000 values"),
    ],
)
def test_invalid_file_is_one_message(text: str, problem: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert error.value.setting == "--config"
    assert error.value.value == str(path)
    assert problem in str(error.value)
    assert error.value.__cause__ is None
    assert error.value.__suppress_context__ or error.value.__context__ is None


@given(content=st.binary(max_size=60) | st.text("ab:-[]{}!&*?|>'\"#% \n\t<1.e", max_size=40))
def test_any_file_content_is_read_or_refused(
    content: bytes | str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with contextlib.suppress(ConfigError):
        assert isinstance(read_yaml(path), dict)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_yaml(tmp_path / "x.yaml")


def test_directory_in_place_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_yaml(tmp_path)


# --- mappings --------------------------------------------------------------------------------


def test_absent_settings_keep_defaults() -> None:
    assert from_mapping(Run, {}) == Run()
    assert from_mapping(Run, {"optim": {"lr": 2}}) == Run(optim=Optim(lr=2.0))


def test_empty_section_keeps_defaults() -> None:
    assert from_mapping(Run, {"optim": None}) == Run()


def test_values_of_every_kind_are_converted() -> None:
    values = {
        "optim": {"lr": 1, "betas": [0, 1e-3], "fused": False, "clip": None},
        "data": {"path": "x", "name": "n", "columns": ["a"], "size": [3, 4], "options": {"k": [1]}},
        "loss_scale": 8,
    }
    run = from_mapping(Run, values)
    assert run == Run(
        optim=Optim(lr=1.0, betas=(0.0, 1e-3), fused=False, clip=None),
        data=Data("x", "n", ("a",), (3, 4), {"k": [1]}),
        loss_scale=8.0,
    )
    assert type(run.optim.lr) is float
    assert type(run.optim.betas[0]) is float
    assert type(run.loss_scale) is float


@pytest.mark.parametrize(
    ("values", "setting", "problem"),
    [
        # Names.
        ({"lr": 1}, "lr", "did you mean 'optim.lr'?"),
        ({"warmup_steps": 1}, "warmup_steps", "did you mean 'optim.schedule.warmup_steps'?"),
        ({"optim": {"steps": 1}}, "optim.steps", "did you mean 'steps'?"),
        ({"optim": {"rl": 1}}, "optim.rl", "choose one of optim.betas, optim.clip"),
        ({"optim": {"beta": 1}}, "optim.beta", "did you mean 'optim.betas'?"),
        ({"optim": {"warmup": 1}}, "optim.warmup", "did you mean 'optim.schedule.warmup_steps'?"),
        ({"optm": {"lr": 1}}, "optm", "did you mean 'optim'?"),
        ({"data": {"shuffle": 1}}, "data.shuffle", "did you mean 'optim.sched"),
        ({"optim.lr": 1}, "optim.lr", "write 'lr' as a line below the section 'optim'"),
        ({"xyzzy": 1}, "xyzzy", "choose one of data, loss_scale, optim, steps"),
        ({3: 1}, "3", "unknown setting"),
        ({None: 1}, "None", "unknown setting"),
        # Values.
        ({"optim": {"lr": "3e-4"}}, "optim.lr", "must be a number, not text"),
        ({"optim": {"lr": True}}, "optim.lr", "must be a number"),
        ({"optim": {"lr": None}}, "optim.lr", "must be a number"),
        ({"optim": {"lr": 10**400}}, "optim.lr", "must be a number"),
        ({"optim": {"clip": "off"}}, "optim.clip", "must be a number or null"),
        ({"optim": {"fused": 1}}, "optim.fused", "must be true or false"),
        ({"optim": {"fused": "yes"}}, "optim.fused", "must be true or false"),
        ({"optim": {"betas": 0.9}}, "optim.betas", "must be a list, each item a number"),
        ({"optim": {"betas": [0.9, "x"]}}, "optim.betas[1]", "must be a number"),
        ({"optim": 3}, "optim", "is a section; set optim.lr, optim."),
        ({"optim": {"schedule": [1]}}, "optim.schedule", "is a section; set optim.schedule."),
        ({"optim": {"schedule": {"kind": "step"}}}, "optim.schedule.kind", "one of 'cosine', 'lin"),
        ({"steps": 1.5}, "steps", "must be an integer"),
        ({"steps": 1e6}, "steps", "must be an integer; write 1000000"),
        ({"steps": True}, "steps", "must be an integer"),
        ({"steps": math.inf}, "steps", "must be an integer"),
        ({"loss_scale": "static"}, "loss_scale", "must be a number or 'dynamic' or null"),
        ({"data": {"path": 3}}, "data.path", "must be text; put it in quotes"),
        ({"data": {"path": None}}, "data.path", "must be text"),
        ({"data": {"columns": "ab"}}, "data.columns", "must be a list, each item text"),
        ({"data": {"size": [1]}}, "data.size", "must be a list of length 2"),
        ({"data": {"options": [1]}}, "data.options", "must be a section"),
        ({"data": {"options": {1: 2}}}, "data.options", "must be a section"),
        # Checks of the dataclasses.
        ({"optim": {"lr": -1}}, "optim.lr", "must be positive"),
        ({"steps": 1}, "steps", "must not be less than the warm-up"),
    ],
)
def test_invalid_mapping_is_one_message(values: dict[Any, Any], setting: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(Run, values)
    assert error.value.setting == setting
    assert problem in str(error.value)


# Strings that either version of YAML could read as another type.
NUMBERS = ("3e-4", "1e-08", "1_0", "0x1F", "0o7", "010", "1:30", ".inf", "-", "2024-01-01")
WORDS = ("true", "No", "on", "y", "null", "~", "=", "<<")
SYNTAX = ("", " ", "# x", "a: b", "[", "*a", "!t", "\n", "é")
TRICKY = st.sampled_from([*NUMBERS, *WORDS, *SYNTAX])
TEXT = TRICKY | st.text(max_size=12)
FLOATS = st.floats(allow_nan=False) | st.sampled_from([1e-08, 3e-4, 1e16, 5e-324, math.inf])
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda items: st.lists(items, max_size=3) | st.dictionaries(TEXT, items, max_size=3),
    max_leaves=8,
)
RUNS = st.builds(
    Run,
    optim=st.builds(
        Optim,
        lr=st.floats(min_value=5e-324),
        betas=st.lists(FLOATS, max_size=3).map(tuple),
        fused=st.booleans(),
        clip=st.none() | FLOATS,
        schedule=st.builds(
            Schedule, warmup_steps=st.integers(0, 9), kind=st.sampled_from(["cosine", "linear"])
        ),
    ),
    data=st.builds(
        Data,
        path=TEXT,
        name=st.none() | TEXT,
        columns=st.lists(TEXT, max_size=3).map(tuple),
        size=st.tuples(st.integers(), st.integers()),
        options=st.dictionaries(TEXT, PLAIN, max_size=3),
    ),
    steps=st.integers(min_value=9),
    loss_scale=st.none() | st.just("dynamic") | FLOATS,
)


@pytest.mark.slow
@example(run=Run(data=Data(options={"\x85": None, "\u2028": "\u2029"})))
@given(run=RUNS)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_written_file_gives_an_equal_object(
    run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    write_yaml(run, path)
    assume("***" not in path.read_text())  # a word that names a secret, so the next one is hidden
    # repr distinguishes 1, 1.0 and True, which are equal.
    assert repr(from_mapping(Run, read_yaml(path))) == repr(run)


def test_file_is_readable_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_yaml(Run(data=Data(path="größe")), path)
    text = path.read_text(encoding="utf-8")
    assert "größe" in text
    assert text.index("optim:") < text.index("  lr: 0.001") < text.index("data:")
    assert "betas:\n  - 0.9\n  - 0.95\n" in text


def test_repeated_object_is_written_without_alias(tmp_path: Path) -> None:
    shared = [1, 2]
    path = tmp_path / "run.yaml"
    write_yaml(Run(data=Data(options={"a": shared, "b": shared})), path)
    assert "&" not in path.read_text()


def test_failed_write_keeps_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.yaml"
    write_yaml(Run(steps=50), path)

    def no_space(descriptor: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="no space"):
        write_yaml(Run(steps=60), path)
    assert read_yaml(path)["steps"] == 50
    assert os.listdir(tmp_path) == ["run.yaml"]


# --- command line ----------------------------------------------------------------------------


def test_no_arguments_give_defaults() -> None:
    assert cli() == Run()


@pytest.mark.parametrize(
    "arrange",
    [
        lambda path: ["--config", path, "--optim.lr", "3e-4"],
        lambda path: ["--optim.lr", "3e-4", "--config", path],
        lambda path: [f"--config={path}", "--optim.lr=3e-4"],
    ],
)
def test_overrides_take_precedence_over_file(
    arrange: Callable[[str], list[str]], tmp_path: Path
) -> None:
    path = file_of(tmp_path, "steps: 20\noptim: {lr: 1, fused: false}\n")
    assert cli(*arrange(str(path))) == Run(steps=20, optim=Optim(lr=3e-4, fused=False))


def test_override_does_not_change_other_aliases(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, "data: {options: {a: &x {k: 1}, b: *x}}"))
    run = cli("--config", path, "--data.options.a.k", "2")
    assert run.data.options == {"a": {"k": 2}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--optim.betas", "0.5", "0.6", "0.7"], Run(optim=Optim(betas=(0.5, 0.6, 0.7)))),
        (["--optim.no-fused"], Run(optim=Optim(fused=False))),
        (["--optim.fused", "false"], Run(optim=Optim(fused=False))),
        (["--optim.fused=False"], Run(optim=Optim(fused=False))),
        (["--optim.no-fused", "--optim.fused", "true"], Run()),
        (["--optim.clip", "null"], Run(optim=Optim(clip=None))),
        (["--optim.clip", "None"], Run(optim=Optim(clip=None))),
        (["--data.path", "null"], Run(data=Data(path="null"))),
        (["--data.path", "a=b c"], Run(data=Data(path="a=b c"))),
        (["--data.path=--x=1"], Run(data=Data(path="--x=1"))),
        (["--optim.clip=null"], Run(optim=Optim(clip=None))),
        (["--data.columns"], Run(data=Data(columns=()))),
        (["--data.name", "#a"], Run(data=Data(name="#a"))),
        (["--data.columns", "[a, b]"], Run(data=Data(columns=("a", "b")))),
        (["--data.options.a", "3"], Run(data=Data(options={"a": 3}))),
        (["--data.size", "3", "4"], Run(data=Data(size=(3, 4)))),
        (["--data.options", "{a: 3e-4, b: [x]}"], Run(data=Data(options={"a": 3e-4, "b": ["x"]}))),
        (["--loss_scale", "8"], Run(loss_scale=8.0)),
        (["--loss-scale", "null"], Run(loss_scale=None)),
        (["--optim.schedule.warmup-steps", "5"], Run(optim=Optim(schedule=Schedule(5)))),
        (["--steps", "30", "--steps", "40"], Run(steps=40)),
        # Wrong until the second override is applied.
        (
            ["--optim.schedule.warmup_steps", "200", "--steps", "300"],
            Run(optim=Optim(schedule=Schedule(200)), steps=300),
        ),
    ],
)
def test_overrides_set_values(argv: list[str], expected: Run) -> None:
    assert cli(*argv) == expected


def written(value: object) -> str:
    return str(value).replace("inf", ".inf")


@given(run=RUNS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_override_and_file_give_equal_values(run: Run) -> None:
    argv = [
        *("--optim.lr", written(run.optim.lr)),
        *("--optim.betas", *map(written, run.optim.betas)),
        *("--optim.fused", str(run.optim.fused).lower()),
        *("--optim.clip", written(run.optim.clip)),
        *("--data.size", *map(str, run.data.size)),
        *("--steps", str(run.steps)),
        *("--optim.schedule.kind", run.optim.schedule.kind),
        *("--loss-scale", written(run.loss_scale)),
    ]
    expected = from_mapping(
        Run,
        {
            "optim": {
                "lr": run.optim.lr,
                "betas": list(run.optim.betas),
                "fused": run.optim.fused,
                "clip": run.optim.clip,
                "schedule": {"kind": run.optim.schedule.kind},
            },
            "data": {"size": list(run.data.size)},
            "steps": max(run.steps, 10),
            "loss_scale": run.loss_scale,
        },
    )
    assert cli(*argv, "--steps", str(max(run.steps, 10))) == expected


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--optim.l", "3"], "optim.l = 3: unknown setting; did you mean 'optim.lr'?"),
        (["--lr", "3"], "lr = 3: unknown setting; did you mean 'optim.lr'?"),
        (["--optm.lr=3"], "optm = {'lr': 3}: unknown setting; did you mean 'optim'?"),
        (["--optim.no-fusd"], "optim.no_fusd = True: unknown setting; did you mean 'optim.fused'?"),
        (["--optim.lr", "abc"], "optim.lr = 'abc': must be a number"),
        (["--optim.lr"], "optim.lr = '': must be a number"),
        (["--steps", "1.5"], "steps = 1.5: must be an integer"),
        (["--optim.schedule.kind", "x"], "optim.schedule.kind = 'x': must be one of 'cosine', "),
        (["--optim.betas", "1", "x"], "optim.betas[1] = 'x': must be a number"),
        (["--data.size", "1"], "data.size = [1]: must be a list of length 2"),
        (["--loss-scale", "x"], "loss_scale = 'x': must be a number or 'dynamic' or null"),
        (["--data.options", "[}"], "data.options = '[}': must be a section"),
        (["--data.options", "3"], "data.options = 3: must be a section"),
        (["--data.shuffle", "3", "4"], "data.shuffle = [3, 4]: unknown setting; did you mean"),
        (["--data.shuffle"], "data.shuffle = True: unknown setting; did you mean 'optim.sched"),
        (["--optim", "3"], "optim = 3: is a section; set optim.lr, optim."),
        (["--optim.lr", "3", "--optim", "{clip: 2}"], "optim = {'clip': 2}: is a section; set op"),
        (["--optim", "null"], "optim = None: is a section; set optim.lr, optim."),
        (["--steps", "5", "--steps.x", "3"], "steps.x = 3: steps is not a section; set steps"),
        (["--data.columns", "null"], "data.columns = None: must be a list, each item text"),
        (["--optim.betas=null"], "optim.betas = None: must be a list, each item a number"),
        (["--optim.fused", "true", "true"], "command line = 'true': belongs to no option"),
        (["--optim.fused", "yes"], "optim.fused = 'yes': must be true or false"),
        (["extra"], "command line = 'extra': belongs to no option"),
        (["--optim.lr", "-1"], "optim.lr = -1.0: must be positive"),
        (["--steps", "1"], "steps = 1: must not be less than the warm-up"),
        (["--config"], "--config = '': give the name"),
        (["--config", "--steps"], "--config = '': give the name"),
        (["--config="], "--config = '': give the name"),
    ],
)
def test_invalid_arguments_are_one_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        cli(*argv)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert capsys.readouterr() == ("", "")


def test_config_given_twice_is_refused(tmp_path: Path) -> None:
    path = str(file_of(tmp_path, ""))
    with pytest.raises(ConfigError, match="given twice"):
        cli("--config", path, f"--config={path}")


@pytest.mark.slow
@given(
    argv=st.lists(
        st.sampled_from(
            ["--optim.lr", "--steps", "--optim.fused", "--data.options", "--optim", "--"]
        )
        | st.sampled_from(["1", "true", "null", "x", "-1", "{a: 1}", "--x=", "=", "-", "-x", "--="])
        | st.text(max_size=6),
        max_size=5,
    ).filter(lambda argv: not {"-h", "--help"} & set(argv))
)
@settings(max_examples=200, deadline=None)
def test_any_arguments_are_accepted_or_refused(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        assert isinstance(cli(*argv), Run)


def test_help_shows_values_of_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(file_of(tmp_path, "steps: 4321\n"))
    cli("--steps", "20")  # tyro is imported
    begin = time.thread_time()
    with pytest.raises(SystemExit) as stop:
        cli("--config", path, "--help")
    assert time.thread_time() - begin < 1
    assert stop.value.code in (None, 0)
    out = capsys.readouterr().out
    for expected in ("4321", "--config FILE", "--optim.lr", "Learning rate at its peak", "Train."):
        assert expected in out


def test_settings_import_does_not_import_tyro(tmp_path: Path) -> None:
    program = (
        "import sys; from tests.utils.settings.test_settings import Run, command_line;"
        f"command_line(Run, ['--config', {str(file_of(tmp_path, 'steps: 20'))!r}], 'p', 'd');"
        "assert 'tyro' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SETTINGS = st.recursive(
    st.dictionaries(st.text("abc", min_size=1), VALUES, min_size=1, max_size=3),
    lambda inner: st.dictionaries(st.text("xyz", min_size=1), inner, min_size=1, max_size=3),
)


@given(SETTINGS)
def test_every_setting_has_its_dotted_name(settings: dict[str, Any]) -> None:
    for name, value in flat(settings).items():
        found = settings
        for part in name.split("."):
            found = found[part]
        assert found is value
    assert len(flat(settings)) == _leaves(settings)


def _leaves(value: Any) -> int:
    return sum(map(_leaves, value.values())) if isinstance(value, dict) else 1


def test_hash_depends_on_values_not_order() -> None:
    settings = {"steps": 3, "optim": {"lr": 0.1, "name": "sgd"}}
    same = {"optim": {"name": "sgd", "lr": 0.1}, "steps": 3}
    assert digest(settings) == digest(same)
    text = b'{"optim.lr": 0.1, "optim.name": "sgd", "steps": 3}'
    assert digest(settings) == hashlib.sha256(text).hexdigest()
    assert digest(settings) != digest({**settings, "steps": 4})
    assert digest({"a": "1"}) != digest({"a": 1})


# --- odd files ---------------------------------------------------------------------------------


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (os.mkfifo, "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to("/dev/zero"), "cannot be read \\(Not a regular file\\)"),
        (lambda path: path.symlink_to(path.name), "cannot be read"),
        (text("# comment\n" * 3_000_000), "30000000 bytes, more than 262144"),
        (text("[" * 100_000), "is not valid YAML"),
    ],
    ids=["pipe", "device", "loop", "comments", "deep"],
)
def test_unusual_yaml_is_one_short_message(
    make: Callable[[Path], object], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.yaml"
    make(path)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_yaml(path)
    assert len(str(caught.value)) < 500


def test_plain_aliases_are_read(tmp_path: Path) -> None:
    path = tmp_path / "plain.yaml"
    path.write_text("a: &a {x: 1, y: [2]}\nb: {<<: *a, x: 3}\nc: *a\n")
    expected = {"a": {"x": 1, "y": [2]}, "b": {"x": 3, "y": [2]}, "c": {"x": 1, "y": [2]}}
    assert read_yaml(path) == expected
