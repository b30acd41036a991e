"""Chooses the policy with the fastest products among those that stay below an error."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from distmp.commands.calibrate.formats import FormatCalibration, FormatResult
from distmp.commands.explain.types import group_name
from distmp.diagnosis.product_errors import PRODUCTS, ProductError
from distmp.precision import PrecisionPolicy, as_text

# A product above the error in more than this share of the layers becomes wide in all of them. A
# format is used if at least this share of its layers stays narrow.
MOST_LAYERS = 0.5


class ChosenPolicy(NamedTuple):
    """The policy that a calibration recommends.

    Attributes:
        policy: The policy.
        time: Time of the products of all linear layers relative to bfloat16, for products whose
            time is proportional to the bits of their operands.
        reason: Why it was chosen, as text.
        above: Largest error of each layer that stays wide because of it, by name.
    """

    policy: PrecisionPolicy
    time: float
    reason: str
    above: dict[str, float]

    @property
    def text(self) -> str:
        """The text that `precision.policy` takes."""
        return as_text(self.policy)


def choose_policy(found: FormatCalibration, max_error: float) -> ChosenPolicy:
    """Return the policy with the fastest products whose errors stay below a limit.

    Products and layers above it stay in bfloat16. A format is not used if these are all of its
    products, or most of its layers. Of equally fast policies, the first one is returned.

    Args:
        found: The measurements, the cheapest format first.
        max_error: Largest accepted relative error of a product.
    """
    reasons = [f"{name} cannot be used ({reason})" for name, reason in found.refused.items()]
    usable = {}
    for name, result in found.results.items():
        choice, reason = _with_format(name, result, found.layers, max_error)
        if choice is not None:
            usable[name] = choice
        else:
            reasons.append(reason)
    if not usable:
        return ChosenPolicy(found.wide, 1.0, "; ".join(reasons), {})
    best = min(usable.values(), key=lambda choice: choice.time)
    slower = [name for name, choice in usable.items() if choice.time > best.time]
    reasons += [f"products take longer with {name} ({usable[name].reason})" for name in slower]
    return best._replace(reason="; ".join([best.reason, *reasons]))


def _with_format(
    name: str, result: FormatResult, layers: Sequence[str], max_error: float
) -> tuple[ChosenPolicy | None, str]:
    wide = [
        index
        for index in range(len(PRODUCTS))
        if _share_above(result.products.values(), [index], max_error) > MOST_LAYERS
    ]
    narrow = [index for index in range(len(PRODUCTS)) if index not in wide]
    if not narrow:
        return None, f"all three products of {name} are above the error in most layers"
    above = {
        layer: _largest(errors, narrow)
        for layer, errors in result.products.items()
        if _is_above(errors, narrow, max_error)
    }
    total = len(result.products)
    if len(above) > MOST_LAYERS * total:
        return None, f"{len(above)} of {total} layers are above the error with {name}"
    changes = {f"{PRODUCTS[index]}_format": None for index in wide}
    hp = (*result.policy.hp, *patterns([*above], layers))
    policy = replace(result.policy, **changes, hp=hp)  # type: ignore[arg-type]
    if policy != result.policy:
        policy = replace(policy, name=f"calibrated-{name}")
    reason = f"{total - len(above)} of {total} layers of {name} are below the error"
    if wide:
        reason += f" without {' and '.join(PRODUCTS[index] for index in wide)}"
    time = _relative_time(policy, (total - len(above)) / len(layers))
    return ChosenPolicy(policy, time, reason, above), ""


def _relative_time(policy: PrecisionPolicy, narrow: float) -> float:
    """Return the time of the products of all linear layers, relative to bfloat16.

    Args:
        policy: The policy.
        narrow: Share of the layers with narrow products.
    """
    formats = [getattr(policy, f"{product}_format") for product in PRODUCTS]
    times = [1.0 if name is None else 0.25 if name == "e2m1" else 0.5 for name in formats]
    return 1 - narrow * (1 - sum(times) / len(times))


def _share_above(
    layers: Iterable[Sequence[ProductError]], products: Sequence[int], max_error: float
) -> float:
    above = [_is_above(errors, products, max_error) for errors in layers]
    return sum(above) / len(above)


def _is_above(errors: Sequence[ProductError], products: Sequence[int], max_error: float) -> bool:
    # Also true for NaN.
    return not _largest(errors, products) <= max_error


def _largest(errors: Sequence[ProductError], products: Sequence[int]) -> float:
    """Return the largest error of some products; NaN if one of them is NaN."""
    found = [errors[index].error or 0.0 for index in products]
    return max(found, key=lambda error: math.inf if math.isnan(error) else error)


def patterns(names: Sequence[str], layers: Sequence[str]) -> list[str]:
    """Return patterns of `hp` that match some layers and no other.

    Args:
        names: The layers to match.
        layers: All linear layers.
    """
    found: list[str] = []
    for name in names:
        pattern = group_name(name)
        matched = {layer for layer in layers if fnmatchcase(layer, pattern)}
        found.append(pattern if matched <= {*names} else name)
    return list(dict.fromkeys(found))
