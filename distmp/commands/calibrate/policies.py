"""Trains a few steps of a run under each precision policy in turn, perhaps with several seeds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from distmp.commands.calibrate import loss_scale
from distmp.commands.calibrate.settings import WARM_UP, CalibrationConfig
from distmp.data.evaluation import evaluation_batches
from distmp.distributed.world import World
from distmp.engine.engine import Engine
from distmp.errors import ConfigError, SetupError
from distmp.models.metrics import find_metrics
from distmp.precision import resolve
from distmp.telemetry.measurements import begin_peak, peak_since
from distmp.training import components
from distmp.training.components import ModelAndData
from distmp.training.strategy_choice import choose_strategy
from distmp.utils.units import bytes_text, counted, text_table

# A policy agrees with the reference if the mean of its differences over seeds is at most this
# number of standard deviations of the reference over seeds: another seed changes it as much.
DEVIATIONS = 2.0


@dataclass(frozen=True)
class SeedComparison:
    """The results of policies with several seeds. All policies use the same seeds.

    Attributes:
        values: "loss" and metrics on held-out samples after the last step, one value for each seed,
            by policy and name. The first policy is the reference.
    """

    values: Mapping[str, Mapping[str, list[float]]]

    @property
    def reference(self) -> Mapping[str, list[float]]:
        """The values of the first policy."""
        return next(iter(self.values.values()))

    def noise(self, what: str) -> float:
        """Return the standard deviation of the reference over seeds; NaN if a seed diverged."""
        values = self.reference[what]
        return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan

    def excess(self, policy: str, what: str) -> float:
        """Return the mean over seeds of the differences from the reference with the same seed."""
        pairs = zip(self.values[policy][what], self.reference[what], strict=True)
        return statistics.fmean(value - other for value, other in pairs)

    def agrees(self, policy: str) -> bool:
        """Return whether loss and metrics of a policy are those of the reference, up to noise."""
        return all(
            abs(self.excess(policy, what)) <= DEVIATIONS * self.noise(what)
            for what in self.reference
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values of each policy, and whether it agrees, as JSON values."""
        return {
            policy: {
                "values": {
                    what: [value if math.isfinite(value) else None for value in values]
                    for what, values in found.items()
                },
                "agrees": self.agrees(policy),
            }
            for policy, found in self.values.items()
        }

    def report(self) -> Iterator[str]:
        """Yield a line for the reference and one for each other policy, by loss and metric."""
        first, *others = self.values
        for what, values in self.reference.items():
            noise = self.noise(what)
            yield (
                f"held-out {what}: under {first}, a mean of {statistics.fmean(values):.4f} and a "
                f"standard deviation of {noise:.4f} over {len(values)} seeds; a policy agrees if "
                f"the mean of its differences is at most {DEVIATIONS:g} standard deviations"
            )
            for policy in others:
                excess = self.excess(policy, what)
                verdict = "agrees" if abs(excess) <= DEVIATIONS * noise else "DIFFERS"
                yield f"  {policy} {verdict}: {excess:+.4f}"


# Policies within this factor of the fastest count as equally fast, because of noise.
SAME_SPEED = 1.05


@dataclass(frozen=True)
class PolicyResult:
    """The measurements of a policy.

    Attributes:
        reason: How the device runs the policy (emulated or native).
        losses: Loss of every step, as the mean over the global batch; NaN for a skipped step.
        step_seconds: Median duration of a step after the warm-up.
        memory_bytes: Maximum over the ranks of the additional peak memory.
        skipped: Number of skipped steps.
        held_out: "loss" and metrics on held-out samples after the last step; empty without seeds.
    """

    reason: str
    losses: tuple[float, ...]
    step_seconds: float
    memory_bytes: int
    skipped: int
    held_out: Mapping[str, float] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """Mean loss of the applied steps in the last quarter; NaN without any."""
        last = self.losses[-max(1, len(self.losses) // 4) :]
        applied = [loss for loss in last if not math.isnan(loss)]
        return statistics.fmean(applied) if applied else math.nan


@dataclass(frozen=True)
class Comparison:
    """The results of all policies; the first policy that ran is the reference.

    Attributes:
        steps: Number of steps under each policy.
        world_size: Number of ranks.
        tolerance: Largest accepted relative difference of the last loss from the reference.
        results: The result of each policy by its name, or why the run cannot use it.
        seeds: The comparison over seeds; None if the policies ran with one seed.
    """

    steps: int
    world_size: int
    tolerance: float
    results: dict[str, PolicyResult | str]
    seeds: SeedComparison | None = None

    @property
    def measured(self) -> dict[str, PolicyResult]:
        """The policies that ran."""
        return {name: one for name, one in self.results.items() if isinstance(one, PolicyResult)}

    def difference(self, name: str) -> float:
        """Return the relative difference of a policy's last loss from the reference."""
        first = next(iter(self.measured.values())).last_loss
        apart = abs(self.measured[name].last_loss - first)
        return apart / abs(first) if first else math.inf if apart else 0.0

    def is_accurate(self, name: str) -> bool:
        """Return whether the last loss is within the tolerance, and agrees over seeds."""
        within = self.difference(name) <= self.tolerance
        return within and (self.seeds is None or self.seeds.agrees(name))

    def recommendation(self) -> tuple[str | None, str]:
        """Return the recommended policy and the reason; None if no policy is accurate enough.

        It is the fastest of the accurate policies; of equally fast ones, the one with least memory.
        """
        measured = self.measured
        if not measured:
            return None, "no policy ran"
        accurate = {name: one for name, one in measured.items() if self.is_accurate(name)}
        if not accurate:  # the reference agrees with itself unless it diverged
            advice = "diverged; lower optim.lr, or use another seed"
            return None, f"{next(iter(measured))} {advice}"
        fastest = min(one.step_seconds for one in accurate.values())
        fast = {n: m for n, m in accurate.items() if m.step_seconds <= SAME_SPEED * fastest}
        best = min(fast, key=lambda name: (fast[name].memory_bytes, fast[name].step_seconds))
        others = [name for name in measured if name not in accurate]
        note = f"; the loss is another one under {', '.join(others)}" if others else ""
        within = f"{self.tolerance:.1%}{' and the noise between seeds' if self.seeds else ''}"
        return best, f"least memory of the fastest policies whose loss is within {within}{note}"

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        recommended, reason = self.recommendation()
        return {
            "steps": self.steps,
            "world_size": self.world_size,
            "recommended": recommended,
            "reason": reason,
            "policies": {
                name: {"refused": one}
                if isinstance(one, str)
                else {
                    "reason": one.reason,
                    "memory_bytes": one.memory_bytes,
                    "skipped": one.skipped,
                    # JSON has no infinities and no NaN.
                    "losses": [loss if math.isfinite(loss) else None for loss in one.losses],
                    "step_seconds": one.step_seconds,
                }
                for name, one in self.results.items()
            },
            "seeds": self.seeds.as_json() if self.seeds else {},
        }


def report(compared: Comparison) -> Iterator[str]:
    """Yield the lines of the table and the recommendation."""
    yield f"{compared.steps} steps on {counted(compared.world_size, 'rank')}"
    rows: list[tuple[str, ...]] = [
        ("policy", "ms a step", "memory", "last loss", "difference", "skipped", "")
    ]
    for name, one in compared.results.items():
        if isinstance(one, str):
            rows.append((name, "", "", "", "", "", f"refused: {one}"))
            continue
        rows.append(
            (
                name,
                f"{1000 * one.step_seconds:.1f}",
                bytes_text(one.memory_bytes),
                f"{one.last_loss:.4f}",
                f"{compared.difference(name):.2%}",
                str(one.skipped),
                one.reason,
            )
        )
    yield from text_table(rows, right=range(1, 6))
    if compared.seeds is not None:
        yield from compared.seeds.report()
    recommended, reason = compared.recommendation()
    yield f"use {recommended}: {reason}" if recommended else f"nothing to recommend: {reason}"


def compare(config: CalibrationConfig, world: World) -> Comparison:
    """Train under each policy in turn; every rank must call it. Writes no files.

    Raises:
        SetupError: On every rank, if the run cannot start under any policy.
        ConfigError: On every rank, if seeds are to be compared without held-out samples.
    """
    # Once, so that all policies are measured with the strategy of the run.
    parts = world.ranks.all_or_none(lambda: components.build_model_and_data(config, world))
    if config.seeds and parts.datasets.validation is None:
        raise ConfigError("seeds", config.seeds, "needs held-out samples; set data.held_out")
    config, _ = choose_strategy(config, parts, world)
    del parts
    for name in config.policies:
        # The first use of each dtype loads libraries and kernels, which stay in memory.
        measure(config, world, name, steps=1)
    steps = config.calibrate_steps
    results = {name: measure(config, world, name, steps=steps) for name in config.policies}
    compared = Comparison(steps, world.world_size, config.tolerance, results)
    if config.seeds and compared.measured:
        compared = replace(compared, seeds=_over_seeds(config, world, compared.measured))
    return compared


def _over_seeds(
    config: CalibrationConfig, world: World, results: Mapping[str, PolicyResult]
) -> SeedComparison:
    """Train each policy that ran with further seeds: other data orders and initial weights.

    A checkpoint that the run resumes from has the weights of all seeds.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for name, first in results.items():
        found = [first.held_out]
        for seed in range(config.seed + 1, config.seed + config.seeds):
            other, steps = replace(config, seed=seed), config.calibrate_steps
            again = measure(other, world, name, steps=steps, seed=config.seed)
            assert isinstance(again, PolicyResult)  # it was not refused with the first seed
            found.append(again.held_out)
        values[name] = {what: [each[what] for each in found] for what in first.held_out}
    return SeedComparison(values)


def measure(
    config: CalibrationConfig, world: World, name: str, *, steps: int, seed: int | None = None
) -> PolicyResult | str:
    """Train under one policy; every rank must call it.

    Args:
        config: The run.
        world: All ranks.
        name: The policy.
        steps: Number of steps.
        seed: Seed with which the datasets are built, see `build_model_and_data`.

    Returns:
        Time, memory and losses, or why the run cannot use the policy.
    """
    parts = world.ranks.all_or_none(lambda: components.build_model_and_data(config, world, seed))
    checkpoint = loss_scale.resumed(config)
    start = begin_peak(world.device)
    try:
        engine = components.build_engine(
            config,
            parts,
            world,
            policy=name,
            attribution=False,
            load=checkpoint is not None,
            max_consecutive_skips=steps + 1,  # they are counted instead
        )
    except (ConfigError, SetupError) as error:
        return str(error)
    progress = loss_scale.start(parts, engine, checkpoint)
    losses, seconds, skipped = [], [], 0
    with closing(components.training_batches(config, parts, world, progress)) as batches:
        for _ in range(steps):
            microbatches = next(batches).microbatches
            begin = time.perf_counter()
            numbers = engine.step(microbatches).numbers
            seconds.append(time.perf_counter() - begin)
            losses.append(math.nan if numbers.skipped else numbers.loss)
            skipped += numbers.skipped
    memory = max(world.ranks.gather(peak_since(start, world.device)))
    _, reason = resolve(name, world.device)
    held_out = _held_out(config, parts, engine) if config.seeds else {}
    median = statistics.median(seconds[WARM_UP:] or seconds)
    return PolicyResult(reason, tuple(losses), median, memory, skipped, held_out)


def _held_out(config: CalibrationConfig, parts: ModelAndData, engine: Engine) -> dict[str, float]:
    """Return loss and metrics on held-out samples, the same under every policy and seed."""
    data, samples = parts.datasets.validation, config.validation.samples
    assert data is not None  # see `compare`
    batches = evaluation_batches(data, samples, config.batch.microbatch_size, engine.world)
    # Accuracy, if tokens are predicted and no metrics are configured.
    tokens = config.model.loss == "next_token" and not config.data.is_import_path
    metrics = config.validation.metrics or ({"accuracy": "accuracy"} if tokens else {})
    loss, values = engine.evaluate_metrics(batches, find_metrics(metrics))
    return {"loss": loss, **values}
