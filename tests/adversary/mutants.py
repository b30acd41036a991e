"""Seeded bugs, which the cases have to find: `python -m tests.adversary.mutants`.

A bug is a change of one line in a temporary copy of the package. Cases of the oracle or of the
misuse run with it until one fails, and `mutants.md` records this case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutants.md")


@dataclass(frozen=True)
class Mutant:
    """A change of the source.

    Attributes:
        bug: Description of the bug.
        file: Path of the file in the repository.
        old: The text to replace, which occurs exactly once.
        new: The replacement.
        finder: What has to find it: "oracle", "misuse", or a test, see `cuda_mutants`.
    """

    bug: str
    file: str
    old: str
    new: str
    finder: str = "oracle"

    def apply(self, root: Path) -> None:
        path = root / self.file
        source = path.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.file}: {source.count(self.old)} times {self.old!r}")
        path.write_text(source.replace(self.old, self.new))

    @contextlib.contextmanager
    def applied(self) -> Iterator[Path]:
        """Return the root of a temporary copy of package and tests with this change."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as directory:
            root = Path(directory)
            for name in ("distmp", "tests"):
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, root / name, ignore=ignored)
            self.apply(root)
            yield root


MUTANTS = [
    Mutant(
        "the squared norm is not divided by the replicas",
        "distmp/scaling/step_decision.py",
        "square if part.replicas == 1 else square / part.replicas",
        "square",
    ),
    Mutant(
        "norm and overflow of other ranks are ignored",
        "distmp/scaling/step_decision.py",
        "dist.all_reduce(stats, group=group)",
        "dist.all_reduce(stats[1:], group=group)",
    ),
    Mutant(
        "a weight that is not finite is no overflow",
        "distmp/scaling/step_decision.py",
        "unscale = weight * (loss_scale / nominal_weight)",
        "unscale = weight.nan_to_num(1.0, 1.0) * (loss_scale / nominal_weight)",
    ),
    Mutant(
        "clipping compares the scaled norm",
        "distmp/scaling/step_decision.py",
        "torch.rsub(mean_norm, ",
        "torch.rsub(squares.sqrt(), ",
    ),
    Mutant(
        "the scale grows one step early",
        "distmp/scaling/loss_scale.py",
        "grow = clean >= rules.growth_interval",
        "grow = clean + 1 >= rules.growth_interval",
    ),
    Mutant(
        "hysteresis is ignored",
        "distmp/scaling/loss_scale.py",
        "back_off = in_a_row >= rules.hysteresis",
        "back_off = in_a_row >= 1",
    ),
    Mutant(
        "an overflow does not begin a new count of clean steps",
        "distmp/scaling/loss_scale.py",
        "clean = torch.where(overflow | grow, 0, clean)",
        "clean = torch.where(grow, 0, clean)",
    ),
    Mutant(
        "a skipped step keeps its batch statistics",
        "distmp/parallel/module_buffers.py",
        "values.revert(skipped)",
        "pass",
    ),
    Mutant(
        "a dropped microbatch keeps its batch statistics",
        "distmp/parallel/replicated.py",
        "values.revert(~kept)",
        "pass",
    ),
    Mutant(
        "every rank keeps its own batch statistics",
        "distmp/parallel/module_buffers.py",
        "dist.broadcast(as_sent(flat), dist.get_global_rank(self._group, 0), self._group)",
        "pass",
    ),
    Mutant(
        "ranks start with their own buffers",
        "distmp/parallel/strategy.py",
        "for tensor in (*module.parameters(), *module.buffers()):",
        "for tensor in module.parameters():",
    ),
    Mutant(
        "the place of an absent gradient keeps the one of the step before",
        "distmp/buckets/gradients.py",
        "torch._foreach_zero_(self._starting_at_zero)",
        "pass",
    ),
    Mutant(
        "a parameter frozen during training keeps being updated with its last gradient",
        "distmp/buckets/gradients.py",
        "if slot.name in unused or not slot.parameter.requires_grad:",
        "if slot.name in unused:",
    ),
    Mutant(
        "a parameter that no rank has used is updated under fsdp",
        "distmp/parallel/fsdp.py",
        "if name in unused or not parameter.requires_grad:",
        "if not parameter.requires_grad:",
    ),
    Mutant(
        "a parameter frozen during training is updated under fsdp",
        "distmp/parallel/fsdp.py",
        "if name in unused or not parameter.requires_grad:",
        "if name in unused:",
    ),
    Mutant(
        "a step without a gradient does not count as a zero gradient",
        "distmp/parallel/fsdp.py",
        "parameter.grad = torch.zeros_like(parameter)",
        "pass",
    ),
    Mutant(
        "an optimizer that is not fused steps although the step is skipped",
        "distmp/engine/updates.py",
        "elif decision.found_inf.item() == 0:",
        "else:",
    ),
    Mutant(
        "a fused optimizer does not receive the skip flag",
        "distmp/engine/updates.py",
        "None if known else decision.found_inf ",
        "None if known else torch.zeros_like(decision.found_inf) ",
    ),
    Mutant(
        "skipped steps consume the schedule",
        "distmp/engine/step.py",
        "rate = updates.learning_rates.set(state.counts[0], updates.max_applied)",
        "rate = updates.learning_rates.set(state.counts[:2].sum(), updates.max_applied)",
    ),
    Mutant(
        "only the first microbatch has a weight",
        "distmp/scaling/step_decision.py",
        "math.nan for weight in weights]",
        "math.nan for weight in [weights[0]] * len(weights)]",
    ),
    Mutant(
        "a dropped microbatch keeps its weight",
        "distmp/engine/outcome.py",
        "weight = torch.where(kept, weight, 0)",
        "pass",
    ),
    Mutant(
        "evaluation leaves the model in evaluation mode",
        "distmp/engine/evaluation.py",
        "part.training = mode",
        "pass",
    ),
    Mutant(
        "fsdp takes the mean over ranks",
        "distmp/parallel/fsdp.py",
        "unit.set_gradient_divide_factor(1.0)",
        "unit.set_gradient_divide_factor(float(world.world_size))",
    ),
    Mutant(
        "16-bit parameters are not made from their masters",
        "distmp/buckets/parameters.py",
        "flat.own.copy_(flat.updated)",
        "pass",
    ),
    Mutant(
        "nobody compares the optimizer's tensors with those to be updated",
        "distmp/optim/optimizer_tensors.py",
        "    _check_tensors(optimizer, parameters)\n    are_copies",
        "    are_copies",
        "misuse",
    ),
    Mutant(
        "an optimizer that is changed later is not noticed",
        "distmp/engine/engine.py",
        "self._setup.updates.check(self.optimizer)\n        self._setup.strategy.check_model()",
        "self._setup.strategy.check_model()",
        "misuse",
    ),
    Mutant(
        "a loss that is a mean is not noticed",
        "distmp/engine/likely_mistakes.py",
        "if weight > 1 and is_mean(loss, weight, host_waits=True):",
        "if False:",
        "misuse",
    ),
    Mutant(
        "a loss that was detached passes",
        "distmp/engine/step_checks.py",
        "if torch.is_grad_enabled() and not loss.requires_grad:",
        "if False:",
        "misuse",
    ),
    Mutant(
        "a weight of any type passes",
        "distmp/engine/step_checks.py",
        "if not isinstance(weight, int | float | np.number):",
        "if False:",
        "misuse",
    ),
    Mutant(
        "ranks may step with different numbers",
        "distmp/engine/step.py",
        "    differ = fingerprint.differs(terms) if fingerprint.terms else None",
        "    fingerprint, differ = Fingerprint(0, world_size=1), None",
        "misuse",
    ),
    Mutant(
        "ranks may build different engines",
        "distmp/distributed/comparison.py",
        "if largest != -negated_smallest:",
        "if False:",
        "misuse",
    ),
    Mutant(
        "a rank that another one leaves alone shows gloo's error",
        "distmp/distributed/failing_together.py",
        "if group is None or isinstance(error, DistmpError) or not is_lost_connection(error):",
        "if True:",
        "misuse",
    ),
    Mutant(
        "the model may be changed behind the engine",
        "distmp/engine/engine.py",
        "self._setup.strategy.check_model()",
        "pass",
        "misuse",
    ),
    Mutant(
        "a step may be called without gradients enabled",
        "distmp/engine/engine.py",
        "        step_checks.check_gradients_enabled()\n",
        "",
        "misuse",
    ),
    Mutant(
        "the optimizer may be stepped outside of the engine",
        "distmp/optim/optimizer_tensors.py",
        "if not self._is_stepping:",
        "if False:",
        "misuse",
    ),
]

# Command-line arguments, except for seed and number of cases.
FINDERS = {
    "oracle": ["tests.adversary", "--batch", "30", "--shrink", "0", "--failures", "1"],
    "misuse": ["tests.adversary.misuse", "--failures", "1"],
}
MOST_CASES = {"oracle": 150, "misuse": 800}
# The first complaint in the output: the line before the outcomes of the ranks, or after FAILED.
COMPLAINT = {
    "oracle": re.compile(r"^FAILED \((.*)\)$", re.MULTILINE),
    "misuse": re.compile(r"^(.+)\n  rank 0: ", re.MULTILINE),
}


@dataclass(frozen=True)
class Result:
    """The result of a mutant.

    Attributes:
        mutant: The mutant.
        kinds: Kinds of the complaints of the first case that failed; empty if none did.
        replay: The first case that failed, as JSON.
        seconds: Duration in seconds.
    """

    mutant: Mutant
    kinds: str
    replay: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.adversary.mutants")
    parser.add_argument("--cases", type=int, help="how many cases to try at most")
    parser.add_argument("--finder", choices=FINDERS, help="only mutants that this one has to find")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="mutants whose bug has this text in it")
    options = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if options.only in mutant.bug and options.finder in (None, mutant.finder)
    ]
    results = []
    for mutant in chosen:
        cases = options.cases or MOST_CASES[mutant.finder]
        results.append(_try(mutant, cases, options.seed))
        print(_row(results[-1]), flush=True)
    found = sum(bool(result.kinds) for result in results)
    print(f"{found} of {len(results)} found")
    TABLE.write_text(_table(results))
    return int(found < len(results))


def _try(mutant: Mutant, cases: int, seed: int) -> Result:
    begun = time.monotonic()
    with mutant.applied() as root:
        command = [sys.executable, "-m", *FINDERS[mutant.finder]]
        command += ["--seed", str(seed), "--cases", str(cases)]
        # The working directory is the first entry of the module search path.
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    kinds = COMPLAINT[mutant.finder].search(run.stdout)
    replay = re.search(r"--replay '(.*)'$", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1) or (run.returncode == 1 and kinds is None):
        raise RuntimeError(f"{mutant.bug}: {run.stdout}\n{run.stderr}")
    return Result(
        mutant,
        kinds[1] if kinds else "",
        replay[1] if replay else "",
        time.monotonic() - begun,
    )


def _table(results: list[Result]) -> str:
    """Return the table with these results, and with the existing results of other mutants."""
    rows = {bug_of(row): row for row in rows_of(TABLE)}
    rows |= {result.mutant.bug: _row(result) for result in results}
    known = [rows[mutant.bug] for mutant in MUTANTS if mutant.bug in rows]
    found = sum("| not found |" not in row for row in known)
    return "\n".join(
        [
            "# Seeded bugs",
            "",
            f"{found} of {len(known)} were found by `python -m tests.adversary.mutants`: those of "
            f"arithmetic by the oracle in at most {MOST_CASES['oracle']} cases, those of checks "
            f"by misuse in at most {MOST_CASES['misuse']}.",
            "",
            "| bug | file | found by | complaints |",
            "|---|---|---|---|",
            *known,
            "",
        ]
    )


def rows_of(table: Path) -> list[str]:
    """Return the rows of a table of mutants; none if the file does not exist yet."""
    lines = table.read_text().splitlines() if table.exists() else []
    return [line for line in lines if " | `distmp/" in line]


def bug_of(row: str) -> str:
    """Return the bug in a row of a table of mutants."""
    return row.split(" | ")[0].removeprefix("| ")


def _row(result: Result) -> str:
    mutant = result.mutant
    return f"| {mutant.bug} | `{mutant.file}` | {_case(result.replay)} | {result.kinds or 'none'} |"


def _case(replay: str) -> str:
    """Return a short description of the case."""
    if not replay:
        return "not found"
    case = json.loads(replay)
    ranks = "1 rank" if case["world_size"] == 1 else f"{case['world_size']} ranks"
    if "mistakes" in case:
        return f"{' and '.join(case['mistakes']) or 'no mistake'}, {ranks}"
    from tests.adversary.cases import loads

    of_oracle = loads(replay)
    words = (of_oracle.strategy, of_oracle.policy, ranks, of_oracle.optimizer.name)
    return f"{', '.join(words)}, seed {of_oracle.seed}"


if __name__ == "__main__":
    sys.exit(main())
