"""The device of a benchmark: its command-line options, and timing on it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

CPU = torch.device("cpu")


def parser(
    description: str | None, *, rounds: int | None = None, ranks: bool = False
) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks share: `--device`, `--rounds`, `--ranks`.

    Args:
        description: Text for `--help`.
        rounds: Default number of turns of each method; None omits the option.
        ranks: Whether the number of ranks is an option.
    """
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", type=_device, default="cpu", help="cpu (default) or cuda")
    if rounds is not None:
        options.add_argument("--rounds", type=int, default=rounds, help="turns of each method")
    if ranks:
        options.add_argument("--ranks", type=int, help="default: 2, with GPUs one per GPU")
    return options


def parse(options: argparse.ArgumentParser, **defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the command line, with defaults that depend on the device.

    Args:
        options: A parser created by `parser`.
        **defaults: Defaults by device type, for options whose own default is None.
    """
    arguments = options.parse_args()
    everywhere = {"ranks": {"cpu": 2, "cuda": torch.cuda.device_count()}, **defaults}
    for name, by_device in everywhere.items():
        if getattr(arguments, name, None) is None:
            setattr(arguments, name, by_device[arguments.device.type])
    return arguments


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is neither cpu nor cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device on this machine")
    return CPU if name == "cpu" else torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work; returns immediately on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(work: Callable[[], object], device: torch.device) -> float:
    """Return the duration of `work` in seconds, from an idle device until it is idle again.

    On CUDA it is measured between two events of the current stream.
    """
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


def busy_time(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that `work` takes on a GPU, or the processor time on a CPU.

    Processor time does not count other processes of the machine.
    """
    if device.type == "cuda":
        return elapsed(work, device)
    started = time.process_time()
    work()
    return time.process_time() - started
