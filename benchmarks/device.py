"""Where a benchmark runs: the option for it, and how long work takes there."""

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
        description: For `--help`.
        rounds: Default for the turns of each way; None leaves the option out.
        ranks: Whether the number of ranks is an option.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--device", type=_device, default="cpu", help="cpu (default) or cuda")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds, help="turns of each way")
    if ranks:
        made.add_argument("--ranks", type=int, help="default: 2, on GPUs one for each")
    return made


def parse(made: argparse.ArgumentParser, **defaults: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the command line; what it leaves out takes the default of the device.

    Args:
        made: By `parser`.
        **defaults: By type of device, for options whose own default is None.
    """
    found = made.parse_args()
    everywhere = {"ranks": {"cpu": 2, "cuda": torch.cuda.device_count()}, **defaults}
    for name, by_device in everywhere.items():
        if getattr(found, name, None) is None:
            setattr(found, name, by_device[found.device.type])
    return found


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is neither cpu nor cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("torch sees no CUDA device on this machine")
    return CPU if name == "cpu" else torch.device("cuda", 0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given; a CPU has at once."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def elapsed(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of `work`, from an idle device until it is idle again.

    On CUDA they are taken between two events of the current stream.
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
