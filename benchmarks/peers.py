"""Compare training steps of distmp with other frameworks: `python -m benchmarks.peers`.

All loops use the same transformer, microbatches, optimizer (fused AdamW), clipping and seed: DDP
and FSDP2 by hand, accelerate, Lightning Fabric, DeepSpeed and distmp. Each loop has its own ranks,
and the loops take turns of one step. Memory is measured in separate processes, which also check
that a loop does the same work: its losses must equal those of plain FP32 in one process, up to the
rounding of its compute dtype. A loop with other losses ends the benchmark.

On CPUs it uses two ranks over gloo and 22 M parameters, or 1 M with a dtype that the CPU only
emulates; use `--device cuda --size 350m` for one GPU. Frameworks that are not installed (extra
`peers`) are skipped with a message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import memory, races
from benchmarks.device import parse, parser
from benchmarks.loops import (
    BF16,
    FP16,
    MICROBATCHES,
    Accelerate,
    AccelerateOfDistmp,
    Alone,
    DeepSpeed,
    Distmp,
    Fabric,
    Fsdp2,
    Loop,
    ScalerOfDistmp,
    TorchDDP,
    TorchZero,
    Work,
)
from benchmarks.ranks import RankError, Ranks, elapsed_together, is_rank, serve, take_turns
from benchmarks.report import RECORDS, machine, save
from benchmarks.tables import steps
from distmp.models.settings import ModelConfig
from distmp.parallel.blocks import find_blocks
from distmp.precision.notation import native_dtypes
from distmp.telemetry.measurements import begin_peak, peak_since
from distmp.utils.dtypes import dtype_name

# Packages whose versions are part of a result.
PACKAGES = {
    "accelerate": "accelerate",
    "lightning_fabric": "lightning-fabric",
    "deepspeed": "deepspeed",
}
USUAL_SIZE = {"cpu": "22m", "cuda": "350m"}
# Samples per microbatch and tokens per sample.
SHAPE = {"cpu": (2, 128), "cuda": (8, 1024)}
# Number of steps whose losses are compared.
STEPS = 4


class Entrant(NamedTuple):
    """A loop of a comparison.

    Attributes:
        make: Builds the loop.
        module: The module that must be installed.
        not_on_cpu: Why it is excluded on CPUs; empty if it is not.
        absent: Why it is excluded everywhere; empty if it is not.
    """

    make: Callable[[Work], Loop]
    module: str = "torch"
    not_on_cpu: str = ""
    absent: str = ""

    def missing(self, device: str) -> str:
        """Return why the loop is excluded on a device, or an empty string."""
        if device == "cpu" and self.not_on_cpu:
            return self.not_on_cpu
        if not self.absent and find_spec(self.module) is None:
            return f"`{self.module}` is not installed"
        return self.absent


class Race(NamedTuple):
    """Loops that are compared with each other, and their compute dtype."""

    dtype: torch.dtype
    entrants: dict[str, Entrant]


def _replicated(dtype: torch.dtype | None, policies: tuple[str, ...]) -> dict[str, Entrant]:
    return {
        "torch DDP": Entrant(lambda work: TorchDDP(work, dtype)),
        "torch DDP, `gradient_as_bucket_view`": Entrant(
            lambda work: TorchDDP(work, dtype, views=True)
        ),
        "accelerate": Entrant(lambda work: Accelerate(work, dtype), "accelerate"),
        "Lightning Fabric": Entrant(lambda work: Fabric(work, dtype), "lightning_fabric"),
        # The check of losses refuses it in 16 bits.
        "DeepSpeed, ZeRO 0": _zero(
            dtype,
            0,
            absent=""
            if dtype is None
            else "its losses in 16 bits differ too much from FP32 (0.19.8)",
        ),
        "distmp's accelerate": Entrant(lambda work: AccelerateOfDistmp(work, dtype)),
        **{f"distmp `{policy}`": _distmp(policy, "ddp") for policy in policies},
    }


def _sharded(dtype: torch.dtype | None, policy: str) -> dict[str, Entrant]:
    return {
        "FSDP2 by hand": Entrant(lambda work: Fsdp2(work, dtype)),
        "accelerate": Entrant(
            lambda work: Accelerate(work, dtype, sharded=True),
            "accelerate",
            not_on_cpu="it ignores its FSDP plugin on CPUs and runs DDP",
        ),
        "Lightning Fabric": Entrant(
            lambda work: Fabric(work, dtype, sharded=True),
            "lightning_fabric",
            absent="its FSDP2 strategy does not support loss scaling" if dtype == FP16 else "",
        ),
        "DeepSpeed, ZeRO 3": _zero(dtype, 3),
        f"distmp `{policy}`": _distmp(policy, "fsdp"),
    }


def _zero(dtype: torch.dtype | None, stage: int, absent: str = "") -> Entrant:
    return Entrant(lambda work: DeepSpeed(work, dtype, stage=stage), "deepspeed", absent=absent)


def _distmp(policy: str, strategy: str, **options: Any) -> Entrant:
    return Entrant(lambda work: Distmp(work, policy, strategy, **options))


RACES = {
    "ddp fp32": Race(torch.float32, _replicated(None, ("fp32",))),
    "ddp bf16": Race(BF16, _replicated(BF16, ("bf16-autocast", "bf16"))),
    "ddp fp16": Race(
        FP16,
        {
            **_replicated(FP16, ("fp16-autocast", "fp16")),
            "distmp's scaler in torch DDP": Entrant(lambda work: ScalerOfDistmp(work, FP16)),
        },
    ),
    "ddp bf16, sharded optimizer": Race(
        BF16,
        {
            "torch's ZeroRedundancyOptimizer": Entrant(lambda work: TorchZero(work, BF16)),
            "DeepSpeed, ZeRO 1": _zero(BF16, 1),
            "DeepSpeed, ZeRO 2": _zero(BF16, 2),
            "distmp `bf16`": _distmp("bf16", "ddp", shard_optimizer=True),
        },
    ),
    "fsdp fp32": Race(torch.float32, _sharded(None, "fp32")),
    "fsdp bf16": Race(BF16, _sharded(BF16, "bf16")),
    "fsdp fp16": Race(FP16, _sharded(FP16, "fp16")),
}


class Rank:
    """Runs the measurements of a loop on one rank.

    Args:
        race: Name of the comparison; empty for the reference training.
        loop: Name of the loop.
        size: Size of the transformer.
        ranks: Number of ranks that provide microbatches.
        device: The device of the rank.
    """

    def __init__(self, race: str, loop: str, size: str, ranks: int, device: torch.device) -> None:
        self._device = device

        def make(size: str) -> Loop:
            work = _work(size, self._device)
            return RACES[race].entrants[loop].make(work) if race else Alone(work, ranks)

        # Load kernels and libraries, which stay in memory.
        make("1m").step()
        self._base = begin_peak(self._device)
        self._loop = make(size)
        # Minor page faults of each step that `processor_seconds` measured.
        self._faults: list[int] = []

    def answer(self, order: str) -> Any:
        """Run the measurement named by `order`."""
        return {
            "seconds": self.seconds,
            "processor": self.processor_seconds,
            "faults": self.fewest_faults,
            "work": self.work,
        }[order]()

    def seconds(self) -> float:
        """Return the seconds of one step."""
        return elapsed_together(self._loop.step, self._device)

    def processor_seconds(self) -> float:
        """Return the processor time of one step, which does not count other processes."""
        faults, before = _minor_faults(), time.process_time()
        self._loop.step()
        seconds = time.process_time() - before
        self._faults.append(_minor_faults() - faults)
        return seconds

    def fewest_faults(self) -> int:
        """Return the fewest minor page faults of a step that `processor_seconds` measured."""
        return min(self._faults)

    def work(self) -> dict[str, Any]:
        """Return the losses of some steps, their compute dtype, and the memory peak of the last."""
        losses = []
        with computing_dtype(self._loop.model) as dtypes:
            for step in range(STEPS):
                if step == 2:  # DDP rebuilds its buckets in the second step
                    begin_peak(self._device)
                self._loop.step()
                losses.append(self._loop.loss())
        (computes,) = dtypes
        return {
            "memory": peak_since(self._base, self._device),
            "losses": losses,
            "computes": dtype_name(computes),
        }


def _minor_faults() -> int:
    """Return the number of pages that this process got without reading them from a disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@contextlib.contextmanager
def computing_dtype(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Collect the output dtypes of the linear layers in a model's first block."""
    found: set[torch.dtype] = set()
    block = next(iter(find_blocks(model).values()))
    handles = [
        part.register_forward_hook(lambda _, args, output: found.add(output.dtype))
        for part in block.modules()
        if isinstance(part, nn.Linear)
    ]
    yield found
    for handle in handles:
        handle.remove()


def main() -> int:
    if is_rank():
        return serve(lambda method, world: Rank(**json.loads(method), device=world.device).answer)
    arguments = _arguments()
    if RECORDS:
        check_installed(arguments.races)
    device = arguments.device.type
    references: dict[str, list[float]] = {}
    result: dict[str, Any] = {
        "machine": machine(arguments.device),
        "versions": {name: version(name) for name in PACKAGES.values() if _is_installed(name)},
        "ranks": arguments.ranks,
        "microbatches": MICROBATCHES,
        "turns": arguments.rounds,
        "steps": STEPS,
        "races": {},
    }
    name = "peers" if arguments.size in (None, USUAL_SIZE[device]) else f"peers-{arguments.size}"
    for race in arguments.races:
        size = arguments.size or _size(race, arguments.device)
        if size not in references:
            with started("", "", size, arguments, ranks=1) as alone:
                references[size] = alone.ask("work")[0]["losses"]
        result["races"][race] = _run(race, size, references[size], arguments)
        print(races.rendered(race, result["races"][race]))
        print(races.excluded({race: result["races"][race]}), flush=True)
        path = save(f"{name}-{device}", result)  # after each race, because of the time limit
    print(steps.peers(result).splitlines()[-1])
    print(f"saved to {path}")
    return 0


def check_installed(names: Sequence[str]) -> None:
    """Refuse to record races without a peer that was only not installed.

    Raises:
        SystemExit: With the modules that are missing.
    """
    entrants = [entrant for name in names for entrant in RACES[name].entrants.values()]
    modules = {entrant.module for entrant in entrants if not entrant.absent}
    if missing := sorted(module for module in modules if find_spec(module) is None):
        raise SystemExit(
            f"a recorded race has all peers, and {', '.join(missing)} is not installed; "
            "run pip install --constraint constraints.txt '.[peers]'"
        )


def _arguments() -> argparse.Namespace:
    options = parser(__doc__, rounds=15, ranks=True)
    options.add_argument("--size", help="size of the transformer")
    options.add_argument("--races", nargs="*", choices=RACES, default=list(RACES))
    return parse(options)


def _size(race: str, device: torch.device) -> str:
    """Return the default size of the transformer."""
    dtype = RACES[race].dtype
    native = dtype == torch.float32 or dtype in native_dtypes(device)
    return USUAL_SIZE[device.type] if native else "1m"


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _run(
    race: str, size: str, reference: list[float], arguments: argparse.Namespace
) -> dict[str, Any]:
    """Run a race and return its result, as described in `benchmarks.races`."""
    entrants = RACES[race].entrants
    device = arguments.device
    reasons = {name: entrant.missing(device.type) for name, entrant in entrants.items()}
    names = [name for name, reason in reasons.items() if not reason]
    found: dict[str, Any] = {
        "size": size,
        "tokens": arguments.ranks * _work(size, device).tokens,
        "computes": dtype_name(RACES[race].dtype),
        "reference": reference,
        "loops": {},
        "absent": {name: reason for name, reason in reasons.items() if reason},
    }
    for name in names:
        with started(race, name, size, arguments, environment=memory.EXACT_MALLOC) as ranks:
            try:
                answers = ranks.ask("work")
            except RankError as error:  # too large for this device, or not supported
                found["absent"][name] = str(error)
                continue
        most = max(answer["memory"] for answer in answers)
        found["loops"][name] = {**answers[0], "memory": most}
        races.check_same_work(name, found, found["loops"][name])
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(started(race, name, size, arguments))
            for name in found["loops"]
        }
        seconds = take_turns(running, "seconds", arguments.rounds)
    for name in running:
        if name in seconds:
            found["loops"][name]["seconds"] = seconds[name]
        else:
            del found["loops"][name]
            found["absent"][name] = "its time could not be measured"
    return found


def started(
    race: str,
    loop: str,
    size: str,
    arguments: argparse.Namespace,
    *,
    ranks: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Start the ranks of a loop; see `Rank`."""
    method = json.dumps({"race": race, "loop": loop, "size": size, "ranks": arguments.ranks})
    count, device = ranks or arguments.ranks, arguments.device.type
    return Ranks("benchmarks.peers", method, count, environment, device)


def _work(size: str, device: torch.device) -> Work:
    return Work(ModelConfig(size=size), device, *SHAPE[device.type])


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
