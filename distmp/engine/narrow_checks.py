"""Warns about layers whose products are not narrow, although the policy makes them narrow."""

from __future__ import annotations

from distmp.engine.narrow_products import NarrowStatistics
from distmp.quantization import NarrowLayers

# Number of layers that the warning names.
_NAMED = 3


class CallCheck:
    """Finds, once, the narrow layers that no rank called in the first step.

    Args:
        layers: The layers with narrow products; None: there are none.
    """

    def __init__(self, layers: NarrowLayers | None) -> None:
        self._layers = layers

    def warning(self, statistics: NarrowStatistics | None) -> str | None:
        """Return the warning about a completed step; None if there is none, or after the first.

        Args:
            statistics: Those of the step, over all ranks.
        """
        if self._layers is None or statistics is None:
            return None
        elements = statistics.read()[..., -1].sum(1).tolist()
        if not any(elements):  # all products are wide in this step
            return None
        names = [
            name for name, count in zip(statistics.layers, elements, strict=True) if count == 0
        ]
        narrow = [name for name in names if self._counts_calls(name)]
        self._layers = None
        return _message(narrow) if narrow else None

    def _counts_calls(self, name: str) -> bool:
        """Return whether every call of a layer adds statistics.

        Backward skips the gradients of inputs and weights that need none, also in called layers.
        """
        assert self._layers is not None
        formats = self._layers.states[name].formats
        weight = self._layers.modules[name].weight
        return bool(formats.forward or (formats.wgrad and weight.requires_grad))


def _message(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"no rank called the linear layers {', '.join(map(repr, names[:_NAMED]))}{more} in the "
        "first step; if the model uses their weights without calling them, their products have "
        "the compute dtype, and not the formats of the policy: call the layers, or list them in "
        "precision.policy.hp"
    )
