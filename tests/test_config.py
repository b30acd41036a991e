from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from distmp.checkpoint.settings import CheckpointConfig
from distmp.config import BatchConfig, EarlyStoppingConfig, RunConfig, ValidationConfig, load
from distmp.data.settings import DataConfig
from distmp.engine.settings import RankConsistencyConfig
from distmp.errors import ConfigError
from distmp.optim.settings import OptimizerConfig, ScheduleConfig
from distmp.telemetry.settings import LogConfig
from distmp.utils.settings import from_mapping, setting_annotations
from distmp.utils.settings.yaml_files import read_yaml, write_yaml
from tests.settings import leaf_names

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load_and_describe_their_use(path: Path) -> None:
    if path.stem == "huggingface":
        pytest.importorskip("transformers")
    assert load(["--config", str(path)]) != RunConfig()
    assert path.read_text().startswith("# ")


def test_saved_configuration_loads_equal(tmp_path: Path) -> None:
    config = load(["--config", str(CONFIGS[0]), "--optim.lr", "3e-4", "--optim.max-norm", "None"])
    write_yaml(config, tmp_path / "config.yaml")
    assert from_mapping(RunConfig, read_yaml(tmp_path / "config.yaml")) == config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "-3"], "steps = -3: use 1 to 1,000,000,000,000 steps"),
        (["--steps", "many"], "steps = 'many': must be an integer"),
        (["--seed", "-1"], "seed = -1"),
        (["--strategy", "fdsp"], "strategy = 'fdsp': did you mean 'fsdp'?"),
        (["--precision.policy", "bf61"], "precision.policy = 'bf61': did you mean 'bf16'?"),
        (["--precision.loss-scale.init", "0"], "precision.loss_scale.init"),
        (["--precision.loss-scale.growth-interval", "0"], "precision.loss_scale.growth_interval"),
        (["--optim.lr", "nan"], "optim.lr"),
        (["--optim.name", "adamww"], "optim.name = 'adamww': did you mean 'adamw'?"),
        (
            ["--config", "preset:fp8", "--optim.name", "sgd"],
            "optim.options.betas = [0.9, 0.95]: choose one of dampening",
        ),
        (
            ["--config", "preset:quickstart", "--optim.name", "sgd"],
            "; optim.options: {} removes all options",
        ),
        (["--optim.options", "{beta: 1}"], "optim.options.beta = 1: did you mean 'betas'?"),
        (["--optim.weight-decay", "-1"], "optim.weight_decay"),
        (["--optim.max-norm", "0"], "optim.max_norm"),
        (["--optim.lrr", "1"], "optim.lrr"),
        (["--schedule.name", "cosin"], "schedule.name = 'cosin': did you mean 'cosine'?"),
        (["--schedule.warmup-steps", "1000"], "must be less than steps = 1000"),
        (["--schedule.options", "{a: 1}"], "schedule.options"),
        (["--schedule.final", "2"], "schedule.final"),
        (["--batch.global-batch-size", "0"], "batch.global_batch_size"),
        (["--batch.microbatch-size", "5"], "must be a multiple of batch.microbatch_size"),
        (["--validation.every", "-1"], "validation.every"),
        (["--validation.samples", "0"], "validation.samples"),
        (
            ["--validation.every", "5", "--data.held-out", "0"],
            "validation.every = 5: has no data with data.held_out = 0; set it to 0",
        ),
        (
            ["--validation.metrics", "{right: accuracy}", "--data.held-out", "0"],
            "validation.metrics = {'right': 'accuracy'}: has no data with data.held_out = 0; set",
        ),
        (
            ["--shard-optimizer", "--strategy", "single"],
            "shard_optimizer = True: has no effect under strategy single",
        ),
        (
            ["--sharding.wrap", "Block", "--strategy", "ddp"],
            "sharding.wrap = ['Block']: names blocks, and strategy 'ddp' has none without compile",
        ),
        (["--timeout-minutes", "0"], "timeout_minutes"),
        (["--run-dir", ""], "run_dir"),
        *(
            (["--run-dir", path], f"run_dir = {path!r}: name a directory")
            for path in ("/", ".", "a/..")
        ),
        (["--run-dir", "a\0b"], "run_dir = 'a\\x00b': contains a NUL character"),
        (["--data.pattern", "a\udc80"], "data.pattern = 'a\\udc80': is not valid Unicode"),
        (["--seed", str(2**64)], "seed"),
        (["--log.every", str(2**64)], "log.every = 18446744073709551616: is too large"),
        (["--steps", "1" + 400 * "0"], "use 1 to 1,000,000,000,000 steps"),
        (["--timeout-minutes", "1e300"], "timeout_minutes = 1e+300: use a number above 0, up to"),
        (["--data.workers", "100000"], "data.workers = 100000: must be from 0 to 512"),
        (
            ["--model.options", "{layers: 100000000}"],
            "model.options.layers = 100000000: must be from 1 to 10,000",
        ),
        (["--optim.options", "{a: %s}" % (3000 * "[" + 3000 * "]")], "optim.options = '{a: [[["),
        (["--checkpoint.path", "s3://***@bucket"], "is hidden in files that distmp writes"),
        (["--resume", ""], "resume"),
        (["--batch-size", "4"], "batch_size = 4: unknown setting; set batch.global_batch_size"),
        (["--batchsize", "4"], "batchsize = 4: unknown setting; set batch.global_batch_size"),
        (["--micro-batch-size", "4"], "micro_batch_size = 4: unknown setting; set batch.global_b"),
        (["--batch", "4"], "batch = 4: is a section; set batch.global_batch_size"),
        (["--epochs", "3"], "epochs = 3: unknown setting; a run is as long as its number of st"),
        (["--bf16"], "bf16 = True: unknown setting; set precision.policy"),
        (["--precision", "bf16"], "precision = 'bf16': is a section; set precision.policy"),
        (["--ema", "null"], "ema = None: is a section; set ema.decay; 0 for no average"),
        (
            ["--ema.decay", "null"],
            "ema.decay = None: must be a number; leave it out for its default",
        ),
        (["--validation.samples", "0"], "validation.samples = 0: use 1 or more samples"),
        (["--validation.final-samples", "0"], "use 1 or more samples, or null for all"),
        (["--schedule", "cosine"], "is a section; set schedule.name, schedule.warmup_steps"),
    ],
)
def test_unusable_settings_are_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_advice_names_existing_settings() -> None:
    """Advice for the name of a setting would never be printed."""
    leaves, names = {*leaf_names(RunConfig)}, {*setting_annotations(RunConfig)}
    assert leaves.isdisjoint(RunConfig.advice)
    for text in RunConfig.advice.values():
        written = re.findall(r"\b[a-z_]+\.[a-z_]+\b|(?<=set )[a-z_.]*[a-z_]", text)
        assert written or text.startswith("the launcher")
        assert {*written} <= names, text


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("epochs", 3, r"epochs = 3: unknown setting; .* set steps to"),
        ("micro_batch_size", 3, r"micro_batch_size = 3: unknown setting; .* batch.microbatch_size"),
        ("precision", "bf16", r"precision = 'bf16': is a section; set precision.policy"),
    ],
)
def test_unknown_setting_in_file_gives_advice(name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_mapping(RunConfig, {name: value})


def test_home_directory_is_expanded_in_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    names = ("--run-dir", "--resume", "--checkpoint.path", "--model.weights")
    config = load([f"{name}=~/b" for name in names])
    paths = config.run_dir, config.resume, config.checkpoint.path, config.model.weights
    assert {*paths} == {"/home/a/b"}


def test_configuration_can_be_pickled() -> None:
    config = RunConfig(steps=7)
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config


def test_indivisible_batch_error_names_divisible_sizes() -> None:
    with pytest.raises(ConfigError, match="nearest: 32 or 48"):
        BatchConfig(global_batch_size=40, microbatch_size=16)


@pytest.mark.parametrize(
    ("section", "name"),
    [
        (ValidationConfig, "validation.samples"),
        (EarlyStoppingConfig, "early_stopping.min_delta"),
        (BatchConfig, "batch.microbatch_size"),
        (RankConsistencyConfig, "rank_consistency.every"),
        (OptimizerConfig, "optim.lr"),
        (ScheduleConfig, "schedule.final"),
        (DataConfig, "data.sequence_length"),
        (CheckpointConfig, "checkpoint.keep"),
        (LogConfig, "log.every"),
        (RunConfig, "steps"),
        (RunConfig, "optim"),
        (RunConfig, "run_dir"),
    ],
)
def test_none_for_a_setting_without_null_is_one_message(section: type[object], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = None: must be (an? )?\w+; leave it out"):
        section(**{name.rpartition(".")[2]: None})


def test_phases_are_read_from_bracketed_list() -> None:
    phases = "[{until_tokens: 2, policy: bf16}]"
    (phase,) = load(["--precision.policy=fp8", "--precision.phases", phases]).precision.phases
    assert phase == {"until_tokens": 2, "policy": "bf16"}
