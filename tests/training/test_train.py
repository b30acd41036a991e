"""The training command as a user sees it: its output, its files and its exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from distmp.checkpoint.loading import StoredCheckpoint
from distmp.config import RunConfig, load
from distmp.models.architecture import build_model
from distmp.telemetry.records import StepRecord, read_records
from distmp.train import main
from distmp.utils.settings import from_mapping
from distmp.utils.settings.yaml_files import read_yaml
from tests.checkpoint import listing
from tests.elastic import Job, run_jobs
from tests.progress import wait_until
from tests.torchrun import TINY, corpus, environment, python, run, tiny, torchrun


def losses(records: list[StepRecord]) -> list[float]:
    return [record.loss for record in records]


def trained(tmp_path: Path, *arguments: str, ranks: int = 2) -> list[StepRecord]:
    """Train through torchrun in `tmp_path`; return the records of `--run-dir` run."""
    done = run(torchrun(*tiny(tmp_path, *arguments), ranks=ranks), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_records(tmp_path / "run" / "steps.jsonl")


@pytest.mark.nightly
def test_ddp_and_fsdp_losses_agree(tmp_path: Path) -> None:
    arguments = tiny(tmp_path, "--steps=30", "--optim.lr=1e-2", "--schedule.warmup-steps=5")
    ranks = {"ddp": 2, "fsdp": 2, "single": 1}
    jobs = [
        Job([*arguments, f"--strategy={strategy}"], ranks=number)
        for strategy, number in ranks.items()
    ]
    done = run_jobs(jobs, tmp_path)
    assert [job.exit_codes for job in done] == [{}] * 3, done
    runs = {
        strategy: losses(read_records(tmp_path / str(number) / "run" / "steps.jsonl"))
        for number, strategy in enumerate(ranks)
    }
    assert len(runs["ddp"]) == 30
    assert runs["ddp"][0] > 5
    assert runs["ddp"][-1] < 3.5
    for strategy in ("ddp", "fsdp"):
        torch.testing.assert_close(
            torch.tensor(runs[strategy]), torch.tensor(runs["single"]), rtol=2e-4, atol=0
        )
        # Training amplifies rounding errors; the first steps have hardly any.
        torch.testing.assert_close(
            torch.tensor(runs[strategy][:3]), torch.tensor(runs["single"][:3]), rtol=2e-6, atol=0
        )


@pytest.mark.gpu
def test_gpu_losses_agree_with_cpu(tmp_path: Path) -> None:
    # A deferred model draws its weights on the device, whose generator has other numbers.
    start = f"--model.weights={_weights(tmp_path)}"
    arguments = tiny(tmp_path, start, "--steps=6", "--optim.lr=1e-2", "--checkpoint.every=4")
    cases = (("ddp", 1), ("ddp", 2), ("fsdp", 2))
    jobs = [Job([*arguments, f"--strategy={name}"], ranks=ranks) for name, ranks in cases]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}
    jobs.append(Job([*arguments, "--strategy=single"], ranks=1, variables=no_gpu))
    done = run_jobs(jobs, tmp_path)
    assert [job.exit_codes for job in done] == [{}] * 4, done
    *found, expected = (
        read_records(tmp_path / str(number) / "run" / "steps.jsonl") for number in range(len(jobs))
    )
    for case, records in zip(cases, found, strict=True):
        # On a GPU the tensors are counted, on a CPU the whole process.
        assert 2 * records[-1].memory_bytes < expected[-1].memory_bytes, case
        assert losses(records) == pytest.approx(losses(expected), rel=1e-3), case


@pytest.mark.nightly
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu), 2], ids=["one rank over nccl", "two ranks"]
)
def test_resumed_losses_agree_with_uninterrupted_run(tmp_path: Path, ranks: int) -> None:
    directory = tmp_path / "run"
    arguments = tiny(tmp_path, f"--run-dir={directory}", "--steps=10")
    arguments += ["--strategy=fsdp", "--precision.policy=bf16"]

    def trained(name: str, option: str) -> list[StepRecord]:
        (tmp_path / name).mkdir()
        (done,) = run_jobs([Job([*arguments, option], ranks=ranks)], tmp_path / name)
        assert done.exit_codes == {}, done
        return read_records(directory / "steps.jsonl")

    whole = trained("whole", "--checkpoint.every=4")
    # The other run is the first one as if it had been killed after its second checkpoint.
    last, second = sorted((directory / "checkpoints").glob("step-*"), reverse=True)[:2]
    assert (last.name, second.name) == ("step-000010", "step-000008")
    shutil.rmtree(last)
    resumed = trained("resumed", "--resume=auto")
    assert not (tmp_path / "run-2").exists()
    assert [record.step for record in resumed] == list(range(1, 11))
    assert losses(resumed) == losses(whole)
    assert [record.grad_norm for record in resumed] == [record.grad_norm for record in whole]


def test_run_writes_expected_files_in_its_directory(
    cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = tiny(cwd, "--steps=3", "--run-dir=runs/here", "--log.every=1")
    threads = torch.get_num_threads()
    assert main(arguments) == 0
    assert torch.get_num_threads() == threads
    output = capsys.readouterr().out
    directory = cwd / "runs" / "here"
    assert {path.name for path in directory.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "logs",
        "manifest.json",
        "lease-000001.json",
        "steps.jsonl",
    }
    config = from_mapping(RunConfig, read_yaml(directory / "config.yaml"))
    assert (config.steps, config.data.path) == (3, str(cwd / "corpus"))
    assert [record.step for record in read_records(directory / "steps.jsonl")] == [1, 2, 3]
    assert listing.latest(directory / "checkpoints") == directory / "checkpoints" / "step-000003"
    for expected in ("data:", "precision fp32", "strategy single", "step 3/3", "held-out loss"):
        assert expected in output
    # A second run of the same name gets its own directory.
    assert main(arguments) == 0
    assert (cwd / "runs" / "here-2" / "steps.jsonl").exists()


@pytest.mark.nightly
def test_data_model_and_loss_are_imported_by_path(cwd: Path) -> None:
    module = _module(cwd)
    arguments = [
        f"--data.source={module}:line",
        "--data.options={slope: 3.0}",
        f"--model.name={module}:affine",
        f"--model.loss={module}:squared",
        "--batch.global-batch-size=8",
        "--batch.microbatch-size=4",
        "--precision.policy=fp32",
        "--optim.name=sgd",
        "--optim.lr=0.3",
        "--optim.weight-decay=0",
        "--optim.max-norm=None",
        "--schedule.name=constant",
        "--steps=60",
        "--run-dir=run",
    ]
    assert main(arguments) == 0
    records = read_records(cwd / "run" / "steps.jsonl")
    assert records[0].loss > 0.1
    assert records[-1].loss < 1e-6
    assert records[-1].validation_loss is not None
    assert records[-1].validation_loss < 1e-6
    assert records[-1].weight == 8


def test_run_that_skips_every_step_ends(
    cwd: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmp.config.MAX_CONSECUTIVE_SKIPS", 3)
    arguments = [
        f"--data.source={_module(cwd)}:line",
        "--data.options={slope: .nan}",
        "--model.name=users_models:affine",
        "--model.loss=users_models:squared",
        "--precision.policy=fp32",
        "--run-dir=run",
    ]
    assert main(arguments) == 1
    output = capsys.readouterr().err
    assert output.startswith("distmp: ")
    assert "max_consecutive_skips" in output
    assert "Traceback" not in output
    records = read_records(cwd / "run" / "steps.jsonl")
    assert [record.skipped for record in records] == [True] * 3


INTEGERS = "integer parameters in fp16"
WRONG: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "unknown key": (
        lambda tmp: ["--config", _file(tmp / "c.yaml", "optim:\n  learning_rate: 1\n")],
        "optim.learning_rate = 1: unknown setting",
    ),
    "wrong type": (
        lambda tmp: ["--config", _file(tmp / "c.yaml", "steps: soon\n")],
        "steps = 'soon': must be an integer",
    ),
    "negative steps": (lambda tmp: ["--steps=-1"], "steps = -1: use 1 to"),
    "missing data directory": (lambda tmp: [f"--data.path={tmp / 'nowhere'}"], "data.path = "),
    "empty data directory": (
        lambda tmp: [f"--data.path={_directory(tmp / 'empty')}"],
        "data.path = ",
    ),
    "unreadable YAML": (
        lambda tmp: ["--config", _file(tmp / "c.yaml", "steps: [1\nseed: 2\n")],
        "line 2, column",
    ),
    "missing file": (lambda tmp: [f"--config={tmp / 'no.yaml'}"], "cannot be read (No such file"),
    "unknown model path": (
        lambda tmp: ["--model.name=no_such_module:Model"],
        "model.name = 'no_such_module:Model': there is no module 'no_such_module'",
    ),
    "unknown strategy": (lambda tmp: ["--strategy=dpp"], "did you mean 'ddp'?"),
    "batch that does not divide": (
        lambda tmp: ["--batch.global-batch-size=6", "--batch.microbatch-size=4"],
        "batch.global_batch_size = 6",
    ),
    INTEGERS: (
        lambda tmp: [
            *tiny(tmp, "--precision.policy=fp16", "--model.options={}"),
            f"--model.name={_module(tmp)}:quantized",
        ],
        "parameter 'codes' is int8",
    ),
    "resuming from nothing": (lambda tmp: tiny(tmp, f"--resume={tmp / 'nowhere'}"), "resume = "),
    "null for a number": (
        lambda tmp: ["--config", _file(tmp / "c.yaml", "validation:\n  every: null\n")],
        "validation.every = None: must be an integer; leave it out for its default",
    ),
    "no optimizer": (
        lambda tmp: tiny(tmp, f"--optim.name={_module(tmp)}:no_optimizer"),
        "optim.name = 'users_models:no_optimizer': returned a NoneType; name a class or a function",
    ),
    "fewer samples than a step": (
        lambda tmp: [
            f"--data.source={_module(tmp)}:line",
            "--data.options={slope: 1.0}",
            "--model.name=users_models:affine",
            "--model.loss=users_models:squared",
            "--batch.global-batch-size=128",
        ],
        "batch.global_batch_size = 128: is more than the 64 samples of the training data",
    ),
    "lazy model": (
        lambda tmp: tiny(tmp, "--model.options={}", f"--model.name={_module(tmp)}:lazy"),
        "model = '0.weight': has no shape yet; give its layer all sizes, or run a batch",
    ),
    "sharding one process": (
        lambda tmp: tiny(tmp, "--strategy=fsdp"),
        "strategy = 'fsdp': needs several ranks, but only one process was started",
    ),
}


def _weights(directory: Path) -> Path:
    """Write initial weights of `TINY`."""
    torch.manual_seed(0)
    model = build_model(load(TINY).model, 257, 32)
    save_file(model.state_dict(), directory / "start.safetensors")
    return directory / "start.safetensors"


def _file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def _module(directory: Path) -> str:
    """Write models as a user would; return the module's name."""
    (directory / "users_models.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Quantized(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        codes = torch.zeros(8, dtype=torch.int8)\n"
        "        self.codes = nn.Parameter(codes, requires_grad=False)\n"
        "        self.scale = nn.Parameter(torch.ones(8))\n"
        "def quantized():\n"
        "    return Quantized()\n"
        "class Failing(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.table = nn.Embedding(257, 257)\n"
        "        self.calls = 0\n"
        "    def forward(self, tokens):\n"
        "        self.calls += 1\n"
        "        if self.calls == 5 and torch.distributed.get_rank() == 1:\n"
        "            raise ValueError('a fault of the model')\n"
        "        return self.table(tokens)\n"
        "def failing():\n"
        "    return Failing()\n"
        "def line(split, sequence_length, slope):\n"
        "    points = torch.linspace(-1, 1, 64 if split == 'train' else 8)\n"
        "    return [(x.view(1), slope * x.view(1) + 1) for x in points]\n"
        "class Keyed:\n"
        "    def __len__(self):\n"
        "        return 64\n"
        "    def __getitem__(self, index):\n"
        "        return {}['x']\n"
        "def keyed(split, sequence_length):\n"
        "    return Keyed()\n"
        "def no_optimizer(groups, **options):\n"
        "    return None\n"
        "def lazy():\n"
        "    return nn.Sequential(nn.LazyLinear(8))\n"
        "def affine():\n"
        "    return nn.Linear(1, 1)\n"
        "def squared(model, batch):\n"
        "    x, y = batch\n"
        "    return (model(x) - y).square().sum(), len(x)\n"
    )
    return "users_models"


@pytest.mark.parametrize("case", WRONG)
def test_invalid_configuration_returns_exit_code_2(
    case: str, cwd: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, message = WRONG[case]
    assert main(arguments(cwd)) == 2
    output = capsys.readouterr()
    assert output.err.startswith("distmp: ")
    assert output.err.count("\n") == 1
    assert message in output.err
    assert output.out == ""
    assert not (cwd / "runs").exists()


@pytest.mark.parametrize("workers", [0, 1])
def test_failing_dataset_is_one_message(
    workers: int, cwd: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        f"--data.source={_module(cwd)}:keyed",
        f"--data.workers={workers}",
        "--model.name=users_models:affine",
        "--model.loss=users_models:squared",
        "--run-dir=run",
    ]
    assert main(arguments) == 1
    error = capfd.readouterr().err
    assert re.search(
        r"^distmp: sample \d+ of the dataset Keyed cannot be read: KeyError: 'x' "
        r"\(.*users_models.py:\d+\)$",
        error,
        re.M,
    )
    assert "Traceback" not in error


@pytest.mark.nightly
def test_ranks_print_common_message_once(tmp_path: Path) -> None:
    cases = [WRONG[name] for name in ("unknown key", "missing data directory", INTEGERS)]
    directories = [_directory(tmp_path / str(number)) for number in range(len(cases))]
    jobs = [Job(arguments(directories[number])) for number, (arguments, _) in enumerate(cases)]
    for done, (_, message) in zip(run_jobs(jobs, tmp_path), cases, strict=True):
        assert set(done.exit_codes.values()) == {2}, done
        assert done.stderr.count(message) == 1, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


@pytest.mark.nightly
def test_ranks_under_torchrun_print_one_message(tmp_path: Path) -> None:
    arguments, message = WRONG["unknown key"]
    done = run(torchrun(*arguments(tmp_path)), tmp_path)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1
    first = re.search(r"Root Cause.*?exitcode +: (\S+)", done.stderr, flags=re.DOTALL)
    assert first is not None, done.stderr
    assert first[1] == "2"


@pytest.mark.nightly
def test_launch_returns_exit_code_of_invalid_configuration(tmp_path: Path) -> None:
    arguments, message = WRONG[INTEGERS]
    launched = run(python("-m", "distmp", "launch", "--", *arguments(tmp_path)), tmp_path)
    assert launched.returncode == 2
    assert launched.stderr.count(message) == 1
    assert "Traceback" not in launched.stderr


@pytest.mark.nightly
def test_help_is_printed_once(tmp_path: Path) -> None:
    (done,) = run_jobs([Job(["--help"])], tmp_path)
    assert done.exit_codes == {}
    assert done.stdout.count("--optim.lr") == 1


def _command(launcher: str, arguments: list[str]) -> list[str]:
    if launcher == "torchrun":
        return torchrun(*arguments)
    return python("-m", "distmp", "launch", "--", *arguments)


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "distmp launch"])
def test_first_cause_of_failure_is_printed_first(launcher: str, tmp_path: Path) -> None:
    arguments = [
        f"--data.path={corpus(tmp_path / 'corpus')}",
        f"--model.name={_module(tmp_path)}:failing",
        "--data.sequence-length=32",
        "--precision.policy=fp32",
        "--steps=50",
    ]
    done = run(_command(launcher, arguments), tmp_path, timeout=60)
    assert done.returncode == 1
    reports = [line for line in done.stderr.splitlines() if line.startswith("distmp: rank")]
    assert reports == ["distmp: rank 1 of 2 failed:"]
    assert done.stderr.count("ValueError: a fault of the model") == 1
    assert "ValueError" in done.stderr.partition("Root Cause")[0]


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["torchrun", "distmp launch"])
def test_ctrl_c_ends_all_ranks_with_checkpoint(launcher: str, tmp_path: Path) -> None:
    command = _command(launcher, tiny(tmp_path, "--steps=20000"))
    with (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            records = tmp_path / "run" / "steps.jsonl"
            wait_until(
                lambda: (
                    job.poll() is not None
                    or (records.exists() and records.read_text().count("\n") >= 10)
                )
            )
            assert job.poll() is None, "the run ended by itself"
            ranks = psutil.Process(job.pid).children(recursive=True)
            os.killpg(job.pid, signal.SIGINT)  # as a terminal does
            code = job.wait()
            assert not [rank for rank in ranks if rank.is_running()]
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        log.seek(0)
        output = log.read()
    last = read_records(records)[-1].step
    checkpoint = listing.latest(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert StoredCheckpoint(checkpoint).state.numbers["step"] == last
    assert f"stopped after step {last}" in output
    if launcher == "torchrun":
        # torchrun reports the signal with a traceback; the ranks print none.
        assert output.count("Traceback") <= 1
        assert code != 0
    else:
        assert "Traceback" not in output
        assert code == 128 + signal.SIGINT
