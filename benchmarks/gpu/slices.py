"""The jobs that run on a GPU, divided into slices."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

SLICE_SECONDS = 540
LARGE = "1.3b"
# The models of several training loops are in GPU memory at the same time.
LARGE_BYTES = 120 * 2**30

# Directories with tests that need a real device.
_REAL = ("benchmarks", "distributed", "precision", "quantization", "telemetry")
# Tests wait for each other's processes to start; they share the GPU.
WORKERS = 8
_TORCHRUN = ("torch.distributed.run", "--standalone")
_TRACED = (
    "--config=configs/quickstart.yaml",
    "--model.size=22m",
    "--steps=30",
    "--schedule.warmup-steps=5",
    "--profile.steps=20:22",
    "--validation.final-samples=8",
)


class Job(NamedTuple):
    """A run of tests or a benchmark.

    Attributes:
        name: Name for `--only` and `--skip`, and of its directory.
        arguments: Arguments of `python -m`.
        limit: Time limit in seconds.
    """

    name: str
    arguments: tuple[str, ...]
    limit: int

    @property
    def has_tests(self) -> bool:
        """Whether the job runs tests."""
        return self.arguments[0] == "pytest"


class Slice(NamedTuple):
    """Jobs that together take at most `SLICE_SECONDS`.

    Attributes:
        title: What the jobs show.
        jobs: The jobs, the most important first.
    """

    title: str
    jobs: tuple[Job, ...]


def slices(size: str, large: str | None, output: Path) -> list[Slice]:
    """Return the slices, the most important first.

    Args:
        size: Size of the trained models.
        large: Size of a model for another comparison with peers; None omits it.
        output: Directory with a directory for each job.
    """
    bf16 = ("--races", "ddp bf16", "fsdp bf16")
    peers = [_benchmark("peers", 270, "--size", size, *bf16)]
    if large is not None:
        peers.append(_benchmark("peers", 270, "--size", large, *bf16, name="peers_large"))
    steps = ("-m", "benchmarks.first_steps", "--device", "cuda", "--size", size)
    return [
        Slice(
            "first look: kernels, one step after the other under each strategy",
            (
                _tests("first", 50, "real_gpu", *(f"tests/{one}" for one in _REAL)),
                Job("first_steps", (*_TORCHRUN, "--nproc-per-node=gpu", *steps), 70),
            ),
        ),
        Slice(
            "all tests, work after backward, the loss, traces",
            (
                _tests("tests", 240, "gpu", "tests"),
                _benchmark("step_tail", 60),
                _benchmark("loss", 90),
                _trace("ddp", output),
                _trace("fsdp", output),
            ),
        ),
        Slice("training steps compared with other libraries", tuple(peers)),
        Slice(
            "precision policies, accumulation",
            (
                _benchmark("policies", 240, "--size", size),
                _benchmark("accumulation_step", 240, "--size", size, "--rounds", "5"),
                _benchmark("accumulation_passes", 60, "--size", size),
            ),
        ),
        Slice(
            "accumulation of many microbatches, precision, memory",
            (
                _benchmark("accumulation_microbatches", 240),
                _benchmark("precision", 90),
                _benchmark("activation_checkpointing", 60),
            ),
        ),
    ]


def _tests(name: str, limit: int, marker: str, *directories: str) -> Job:
    # One test that hangs leaves time for others.
    options = ["-m", marker, "-q", "--continue-on-collection-errors", f"--numprocesses={WORKERS}"]
    options.append(f"--timeout={limit * 2 // 3}")
    return Job(name, ("pytest", *options, *directories), limit)


def _trace(strategy: str, output: Path) -> Job:
    name = f"trace_{strategy}"
    run = (f"--strategy={strategy}", f"--run-dir={output / name / 'run'}")
    return Job(name, (*_TORCHRUN, "--nproc-per-node=1", "-m", "distmp.train", *_TRACED, *run), 55)


def _benchmark(module: str, limit: int, *options: str, name: str | None = None) -> Job:
    return Job(name or module, (f"benchmarks.{module}", "--device", "cuda", *options), limit)
