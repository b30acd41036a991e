"""What a checkpoint stores about the run that wrote it, and the comparison with a later run."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from distmp.config import RunConfig
from distmp.data.datasets import Datasets, identity
from distmp.data.token_metadata import BYTES, TokenMetadata
from distmp.distributed.world import World
from distmp.errors import require
from distmp.masking import is_masked, masked
from distmp.models import adapters, huggingface_files
from distmp.models.architecture import described
from distmp.optim.settings import ScheduleConfig
from distmp.precision import PrecisionPolicy
from distmp.precision.notation import as_text
from distmp.training.components import configured_weights
from distmp.utils.annotations import ResumeRule, resume_rules
from distmp.utils.environment_info import versions
from distmp.utils.files import expanded
from distmp.utils.settings import flat, value_text

_OTHER_SAMPLES = ResumeRule("dangerous", "the position in the data refers to other samples")
_OTHER_TOKENS = ResumeRule("dangerous", "token ids have another meaning")
_OTHER_HELD_OUT = ResumeRule(
    "consequential", "validation losses are not comparable with earlier ones"
)
_OTHER_ROUNDING = ResumeRule("consequential", "forward, backward and reductions round differently")
_HARMLESS = ResumeRule("harmless")

# Properties of a run that are compared and are not settings, by their name in messages: the section
# of the run's fingerprint that holds each, its name there, and the effect of a change.
RUN_PROPERTIES = {
    "samples in the data": ("data", "samples", _OTHER_SAMPLES),
    "vocabulary of the data": ("data", "vocabulary", _OTHER_TOKENS),
    "digest of the data": ("data", "digest", _OTHER_SAMPLES),
    "held-out samples": ("data", "held_out", _OTHER_HELD_OUT),
    "digest of the held-out data": ("data", "held_out_digest", _OTHER_HELD_OUT),
    "number of ranks": ("ranks", "number", _HARMLESS),
    "device": ("ranks", "device", _HARMLESS),
    "resolved precision": ("ranks", "precision", _OTHER_ROUNDING),
    "version of distmp": ("versions", "distmp", _HARMLESS),
    "version of torch": ("versions", "torch", _HARMLESS),
    "version of Python": ("versions", "python", _HARMLESS),
}

_MISSING = object()

logger = logging.getLogger("distmp")


@functools.cache
def all_rules() -> Mapping[str, ResumeRule]:
    """Return the rules of all settings and properties, by name."""
    return resume_rules(RunConfig) | {name: rule for name, (_, _, rule) in RUN_PROPERTIES.items()}


@dataclass(frozen=True)
class Changes:
    """What changed since a checkpoint was written. Each entry is a name and a line about it.

    Attributes:
        harmless: Changes without an effect except for rounding.
        consequential: Changes that are allowed, with their effect.
        dangerous: Changes that make it another run, with their effect.
    """

    harmless: dict[str, str] = field(default_factory=dict)
    consequential: dict[str, str] = field(default_factory=dict)
    dangerous: dict[str, str] = field(default_factory=dict)

    def report(self, log: Callable[[str], object]) -> None:
        """Pass harmless changes to `log`, and log the others as warnings."""
        for line in self.harmless.values():
            log(f"changed: {line}")
        for line in (*self.consequential.values(), *self.dangerous.values()):
            logger.warning("changed: %s", line)

    def refuse(self, checkpoint: str) -> None:
        """Raise if there is a dangerous change.

        Args:
            checkpoint: Path of the checkpoint, for the message.

        Raises:
            ConfigError: One message with all dangerous changes.
        """
        listed = "".join(f"\n  {line}" for line in self.dangerous.values())
        problem = (
            f"belongs to another run:{listed}\n"
            "Restore these values, or set resume_force to true to resume anyway. A new run can "
            "start from its weights: distmp export, then model.weights."
        )
        require(not self.dangerous, "resume", checkpoint, problem)


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare the settings and properties of two runs, name by name.

    Args:
        before: Values when the checkpoint was written, by dotted name.
        now: Values of the run that resumes.
    """
    rules, changes = all_rules(), Changes()
    for name in (*now, *(name for name in before if name not in now)):
        old, new = before.get(name, _MISSING), now.get(name, _MISSING)
        # Without a rule, the setting exists in one of two versions of distmp only.
        rule = rules.get(name, _HARMLESS)
        if old == new and is_masked(new) and rule.kind == "dangerous":
            # A checksum would help to guess a short secret.
            problem = "may be other values, because those of secrets are not compared"
            changes.consequential[name] = f"{name}: {value_text(new)} ({problem})"
        if old == new or rule.kind == "ignored":
            continue
        line = f"{name}: {_as_configured(old)} -> {_as_configured(new)}"
        effect = f" ({rule.effect})" if rule.effect else ""
        getattr(changes, rule.kind)[name] = f"{line}{effect}"
    return changes


def _as_configured(value: Any) -> str:
    return "(unknown)" if value is _MISSING else value_text(value)


def run_fingerprint(
    config: RunConfig, datasets: Datasets, world: World, policy: PrecisionPolicy
) -> dict[str, Any]:
    """Return what a checkpoint stores about its run, as JSON types.

    Args:
        config: The resolved configuration.
        datasets: The data of the run.
        world: The ranks.
        policy: The resolved precision policy.
    """
    installed = versions()
    return {
        "configuration": masked(to_json(config)),
        "data": identity(datasets),
        "ranks": {
            "number": world.world_size,
            "device": world.device.type,
            "precision": as_text(policy),
        },
        "versions": {name: installed[name] for name in ("distmp", "torch", "python")},
    }


def describe_model(model: nn.Module, config: RunConfig) -> dict[str, Any]:
    """Return what a checkpoint stores for `distmp export`, as JSON types.

    Returns:
        "model", the content of config.json or None; "adapter" for a model with adapters, see
        `adapters.describe`; "tokenizer", the directory of the tokenizer, if it is known.
    """
    numbers: dict[str, Any] = {"model": described(model)}
    if config.model.peft is not None:
        weights = configured_weights(config.model)
        base = None if weights is None else str(weights.path.absolute())
        numbers["adapter"] = adapters.describe(model, base)
    if (tokenizer := tokenizer_directory(config)) is not None:
        numbers["tokenizer"] = str(tokenizer.absolute())
    return numbers


def tokenizer_directory(config: RunConfig) -> Path | None:
    """Return the directory of the tokenizer that made the data, or of the model's.

    None if there is none, or ids are bytes, which the model's tokenizer would not understand.
    """
    candidates, are_bytes = [], config.data.source == "text"
    if config.data.source == "tokens":
        path = expanded(config.data.path or "")
        are_bytes = TokenMetadata.read(path).tokenizer == BYTES
        candidates.append(path / huggingface_files.SUBDIRECTORY)
    if config.model.is_hugging_face:
        candidates.append(huggingface_files.locate(config.model.name))
    found = next(filter(huggingface_files.has_tokenizer, candidates), None)
    if found is None or not are_bytes:
        return found
    logger.warning(
        "the tokenizer in %s is neither used nor exported, because the token ids are bytes; to use "
        "it, run `distmp data tokenize`, and set data.source to tokens",
        found,
    )
    return None


def to_json(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as nested dictionaries that JSON preserves."""
    return json.loads(json.dumps(asdict(config), default=str))


def changes_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Compare a run with the one that wrote a checkpoint.

    Args:
        before: The numbers in the checkpoint, the fingerprint of its run among them.
        now: The fingerprint of the run that resumes.
    """
    if "configuration" not in before:  # a custom training loop has written it
        problem = "configuration: not in the checkpoint, so no settings are compared"
        return Changes(consequential={"configuration": problem})
    values = []
    shared = _properties(before).keys() & _properties(now).keys()
    for fingerprint in (before, now):
        settings = flat(masked(fingerprint["configuration"]), all_rules())
        _resolve_warmup(settings)
        properties = _properties(fingerprint).items()
        values.append(settings | {name: value for name, value in properties if name in shared})
    return compare(*values)


def _resolve_warmup(settings: dict[str, Any]) -> None:
    """Replace null by the default number of warm-up updates, because the number is compared."""
    if settings.get("schedule.warmup_steps", 0) is None:
        schedule = ScheduleConfig(settings["schedule.name"], warmup_steps=None)
        settings["schedule.warmup_steps"] = schedule.warmup(settings["steps"])


def _properties(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that a fingerprint contains, by the names of `RUN_PROPERTIES`."""
    values = {
        name: fingerprint.get(section, {}).get(key)
        for name, (section, key, _) in RUN_PROPERTIES.items()
    }
    return {name: value for name, value in values.items() if value is not None}
