"""What a run may change when it goes on from a checkpoint, and what each change means.

Every setting of a run stands in exactly one of the four tables; a test sees to it. So do the facts
that `origin` notes besides: the data, the ranks, the versions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmp.errors import ConfigError

# How a run starts, which it has done long ago, and how it goes on.
NOT_COMPARED = ("resume", "resume_force", "model.weights")

# What has no effect on the weights, or none but rounding. Told line by line.
HARMLESS = (
    "run_dir",
    "strategy",
    "activation_checkpointing",
    "compile",
    "shard_optimizer",
    "timeout_minutes",
    "preflight",
    "max_minutes",
    "watchdog_seconds",
    "model.sequence_length",
    # What these lead to is compared itself: the data, and the precision in force.
    "precision.policy",
    "data.path",
    "data.pattern",
    "data.held_out",
    "data.vocabulary_size",
    "data.workers",
    "number of ranks",
    "device",
    "version of distmp",
    "version of torch",
    "version of Python",
    "batch.microbatch_size",
    "precision.max_consecutive_skips",
    "precision.attribution",
    "sharding.accumulate",
    "sharding.reshard_after_forward",
    "sharding.shard_size",
    "sharding.wrap",
    "sharding.offload",
    "rank_consistency.every",
    "rank_consistency.on_difference",
    "validation.every",
    "validation.samples",
    "validation.final_samples",
    "sample.prompt",
    "sample.length",
    "sample.temperature",
    "checkpoint.every",
    "checkpoint.keep",
    "checkpoint.asynchronous",
    "checkpoint.every_minutes",
    "checkpoint.keep_every",
    "checkpoint.max_gib",
    "checkpoint.on_failure",
    "checkpoint.path",
    "log.every",
    "log.files",
    "log.ranks_every",
    "log.console",
    "log.curves",
    "log.trackers",
    "log.tracker_options",
    "log.project",
    "profile.steps",
)

_RATES = "other learning rates from here on"
_BOUNDS = "steps are judged in another way from here on"
_SCALE = "the loss scale follows this rule from here on"

# What somebody may well want, but ought to know. Told as a warning, with the consequence.
CONSEQUENTIAL = {
    "steps": "a schedule with an end is laid out anew, so that learning rates jump",
    "reproducible": "the bits are no longer those of one run at any number of ranks",
    "data.validation_path": "validation losses do not compare with those before",
    "batch.global_batch_size": "so many samples make a step; the learning rate stays as it is",
    "precision in force": "other roundings in forward, backward and reductions",
    "precision.on_nonfinite": "steps that are not finite are treated in another way",
    "divergence.loss_threshold": _BOUNDS,
    "divergence.max_rollbacks": _BOUNDS,
    "divergence.norm_threshold": _BOUNDS,
    "divergence.on_nonfinite_loss": _BOUNDS,
    "divergence.on_spike": _BOUNDS,
    "divergence.skip_data_steps": _BOUNDS,
    "divergence.warmup_steps": _BOUNDS,
    "precision.loss_scale.dynamic": _SCALE,
    "precision.loss_scale.init": "the loss scale goes on from where it stands",
    "precision.loss_scale.growth_factor": _SCALE,
    "precision.loss_scale.backoff_factor": _SCALE,
    "precision.loss_scale.growth_interval": _SCALE,
    "precision.loss_scale.hysteresis": _SCALE,
    "precision.loss_scale.min_scale": _SCALE,
    "precision.loss_scale.max_scale": _SCALE,
    "optim.lr": _RATES,
    "optim.weight_decay": "another decay from here on",
    "optim.max_norm": "gradients are clipped in another way from here on",
    "optim.options": "the optimizer goes on with the state that it had under other options",
    "schedule.name": _RATES,
    "schedule.warmup_steps": _RATES,
    "schedule.final": _RATES,
    "schedule.options": _RATES,
}

_SHAPE = "weights of another model"
_DATA = "the position in the data belongs to other samples"

# What makes another run of it. Refused, unless forced.
DANGEROUS = {
    "seed": "another order of the data: some samples come twice, others never",
    "model.name": _SHAPE,
    "model.size": _SHAPE,
    "model.layers": _SHAPE,
    "model.dimension": _SHAPE,
    "model.heads": _SHAPE,
    "model.hidden": _SHAPE,
    "model.vocabulary_size": _SHAPE,
    "model.options": _SHAPE,
    "model.loss": "something else is learned",
    "data.source": _DATA,
    "data.sequence_length": _DATA,
    "data.token_dtype": _DATA,
    "data.options": _DATA,
    "optim.name": "its state is that of another optimizer",
    "samples in the data": _DATA,
    "vocabulary of the data": "token ids mean something else",
    "digest of the data": _DATA,
}

_MISSING = object()

logger = logging.getLogger("distmp")


@dataclass(frozen=True)
class Changes:
    """What is not as it was when a checkpoint was written: name to a line about it.

    Attributes:
        harmless: Differences without an effect but rounding.
        consequential: Allowed ones, with what they mean.
        dangerous: Those that make another run of it, with the reason.
        note: What else there is to say.
    """

    harmless: dict[str, str] = field(default_factory=dict)
    consequential: dict[str, str] = field(default_factory=dict)
    dangerous: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def tell(self, say: Callable[[str], object]) -> None:
        """Tell all of them: harmless ones by `say`, the others as warnings."""
        if self.note:
            say(self.note)
        for line in self.harmless.values():
            say(f"changed: {line}")
        for line in (*self.consequential.values(), *self.dangerous.values()):
            logger.warning("changed: %s", line)

    def refuse(self, checkpoint: str) -> None:
        """Raise if there is a dangerous change.

        Args:
            checkpoint: Which one, for the message.

        Raises:
            ConfigError: One message with all of them.
        """
        if self.dangerous:
            listed = "".join(f"\n  {line}" for line in self.dangerous.values())
            raise ConfigError(
                "resume",
                checkpoint,
                f"it is of another run:{listed}\n"
                "Go back to these values, or set resume_force to true if you know better. A new "
                "run can start from its weights: distmp export, then model.weights.",
            )


def compare(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Changes:
    """Compare two configurations and what belongs to them, name by name.

    Args:
        before: Setting (dotted name) to value when the checkpoint was written.
        now: The same of the run that goes on.
        defaults: Value of settings that did not exist yet.
    """
    changes = Changes()
    for name, old, new in _differences(before, now, defaults):
        line = f"{name}: {_shown(old)} -> {_shown(new)}"
        if name in DANGEROUS:
            changes.dangerous[name] = f"{line} ({DANGEROUS[name]})"
        elif name in CONSEQUENTIAL:
            changes.consequential[name] = f"{line} ({CONSEQUENTIAL[name]})"
        else:
            changes.harmless[name] = line
    return changes


def _differences(
    before: Mapping[str, Any], now: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    for name in (*now, *(name for name in before if name not in now)):
        old = before.get(name, defaults.get(name, _MISSING))
        new = now.get(name, _MISSING)
        if name not in NOT_COMPARED and old != new:
            yield name, old, new


def _shown(value: Any) -> str:
    """Return a value as it stands in a configuration."""
    if value is _MISSING:
        return "(unknown)"
    return value if isinstance(value, str) else json.dumps(value, default=str)
