"""Run benchmarks: `python -m benchmarks [NAME ...]`; all of `make bench` without names.

Results go to `build/benchmarks`. With `--record` they replace those in `benchmarks/results`, and
the tables of README.md and `docs/` are generated from them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from typing import NamedTuple

from benchmarks import figures
from benchmarks.ages import older
from benchmarks.report import DIRECTORY, RESULTS, SMOKE

ONE_ROUND = ("--rounds=1",)


class Benchmark(NamedTuple):
    """How a benchmark is run.

    Attributes:
        smoke: Its options with `--smoke`.
        default: Whether it is part of a run of all benchmarks.
    """

    smoke: tuple[str, ...] = ()
    default: bool = True


BENCHMARKS = {
    "first_steps": Benchmark(("--size=1m",)),
    "quickstart": Benchmark((*ONE_ROUND, "--steps=3")),
    "step_tail": Benchmark((*ONE_ROUND, "--elements=65536", "--parameter-size=4096")),
    "host_cost": Benchmark((*ONE_ROUND, "--microbatches=2")),
    "predicted_step": Benchmark(),
    "accumulation_error": Benchmark(),
    "accumulation_microbatches": Benchmark(ONE_ROUND),
    "accumulation_passes": Benchmark((*ONE_ROUND, "--size=1m")),
    "accumulation_step": Benchmark((*ONE_ROUND, "--size=1m")),
    "reproducible": Benchmark(("--steps=2", "--sequence-length=8")),
    "muon": Benchmark(),
    "loss": Benchmark(ONE_ROUND),
    "activation_checkpointing": Benchmark(ONE_ROUND),
    "precision": Benchmark(),
    "rl_mismatch": Benchmark(("--steps=1",)),
    "peers": Benchmark((*ONE_ROUND, "--size=1m", "--races", "fsdp fp32")),
    "guard": Benchmark(ONE_ROUND),
    "growth": Benchmark(),
    "checkpoint_stall": Benchmark(ONE_ROUND),
    "start_up": Benchmark(ONE_ROUND),
    # These train for hours on a CPU.
    "lean_state": Benchmark(("--seeds=1", "--size=1m"), default=False),
    "narrow_formats": Benchmark(("--seeds=1", "--size=1m"), default=False),
}


def main() -> int:
    arguments, options = _arguments()
    environment = dict(os.environ)
    if arguments.record:
        environment[DIRECTORY] = str(RESULTS)
    if arguments.smoke:
        environment[SMOKE] = "1"
    failed = []
    for name in arguments.names or [name for name, one in BENCHMARKS.items() if one.default]:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        command += BENCHMARKS[name].smoke if arguments.smoke else options
        started = time.monotonic()
        print(f"== {name}", flush=True)
        if subprocess.run(command, env=environment).returncode:
            failed.append(name)
        print(f"== {name} took {time.monotonic() - started:.0f} s", flush=True)
    if arguments.record:
        figures.main()
    print("\n".join(older()))
    if failed:
        print(f"failed: {', '.join(failed)}; see the messages above", file=sys.stderr)
    return len(failed)


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--record", action="store_true", help="replace recorded results and tables")
    how.add_argument("--smoke", action="store_true", help="smallest size, one round")
    arguments, options = parser.parse_known_args()
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is named {', '.join(unknown)}; choose from {[*BENCHMARKS]}")
    if options and len(arguments.names) != 1:
        parser.error(f"{' '.join(options)} is an option of one benchmark; name it")
    return arguments, options


if __name__ == "__main__":
    sys.exit(main())
