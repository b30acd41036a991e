"""Finds the first narrow product of a forward and backward that is not finite."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor

from distmp.diagnosis.probe import Probe, count_non_finite
from distmp.parallel.strategy import parameter_name
from distmp.quantization import NarrowLayers
from distmp.quantization.linear import GRAD, INPUT, WEIGHT, WGRAD_GRAD, WGRAD_INPUT

# Operands in the order in which a layer rounds them in backward, with their products.
_IN_BACKWARD = (
    (GRAD, "grad", "output gradient"),
    (WGRAD_GRAD, "wgrad", "output gradient"),
    (WGRAD_INPUT, "wgrad", "input"),
)


class NarrowOverflow(NamedTuple):
    """A narrow product with an operand or a result that is not finite.

    Attributes:
        layer: Name of the linear layer.
        product: "forward", "grad" (for the gradient of the input) or "wgrad" (of the weight).
        what: "input", "weight", "output gradient", or "result" if both operands are finite.
        number_format: Format of the product, such as "e4m3".
    """

    layer: str
    product: str
    what: str
    number_format: str

    @property
    def is_grad_result(self) -> bool:
        """Whether it is the result of grad."""
        return (self.product, self.what) == ("grad", "result")


class NarrowWatch:
    """Watches the narrow products of one forward and backward in a `with` block.

    Args:
        layers: The layers with narrow products, whose statistics are cleared; None: there are none.
        probe: The probe of the same forward and backward.
    """

    def __init__(self, layers: NarrowLayers | None, probe: Probe) -> None:
        self._layers = layers
        self._probe = probe
        self._called: dict[str, None] = {}
        # The layer whose gradient of the input was not finite before that of any parameter.
        self._bad_result: str | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> NarrowWatch:
        if self._layers is not None:
            self._layers.begin_step()
            for name, module in self._layers.modules.items():
                handle = module.register_forward_pre_hook(self._hook(name))
                self._hooks.callback(handle.remove)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._hooks.close()

    def first(self) -> NarrowOverflow | None:
        """Return the narrow product with the first value that is not finite.

        If the probe found an earlier value, or one of another module, that one is the cause.
        """
        if self._layers is None:
            return None
        values = self._layers.counts[..., 0].isfinite().tolist()
        finite = dict(zip(self._layers.modules, values, strict=True))
        if self._probe.forward is not None:
            return self._in_forward(parameter_name(self._probe.forward.module), finite)
        return self._in_backward(self._bad_parameter(), finite)

    def _bad_parameter(self) -> str | None:
        """Return the first parameter with a non-finite gradient so far."""
        gradients = self._probe.gradients().items()
        bad = (name for name, summary in gradients if summary.inf or summary.nan)
        return next(map(parameter_name, bad), None)

    def _hook(self, name: str) -> Any:
        def note(module: Any, args: Any) -> Any:
            self._called.setdefault(name)
            if not args or not isinstance(args[0], Tensor):
                return None
            # The gradient of the input itself may have terms of other modules.
            own = args[0].view_as(args[0])
            if own.requires_grad:
                own.register_hook(self._result_hook(name))
            return (own, *args[1:])

        return note

    def _result_hook(self, layer: str) -> Any:
        def check(gradient: Tensor) -> None:
            if self._bad_result is None and count_non_finite(gradient):
                parameter = self._bad_parameter()
                if parameter is None or _is_of(parameter, layer):
                    self._bad_result = layer

        return check

    def _in_forward(self, module: str, finite: dict[str, Sequence[bool]]) -> NarrowOverflow | None:
        if module not in finite:
            return None
        number_format = self._format(module, "forward")
        if number_format is None:
            return None
        operands = finite[module]
        what = "result" if operands[WEIGHT] else "weight"
        return NarrowOverflow(
            module, "forward", what if operands[INPUT] else "input", number_format
        )

    def _in_backward(
        self, parameter: str | None, finite: dict[str, Sequence[bool]]
    ) -> NarrowOverflow | None:
        """Return the first product in backward, if no other module has a bad gradient before it.

        Args:
            parameter: The first parameter with a non-finite gradient.
            finite: Whether each operand is finite, by layer.
        """
        for layer in reversed(self._called):
            found = self._of_layer(layer, finite[layer], parameter)
            if found is not None:
                # The result of grad is before the gradients of parameters that follow from it.
                is_first = parameter is None or _is_of(parameter, layer) or found.is_grad_result
                return found if is_first else None
        return None

    def _of_layer(
        self, layer: str, finite: Sequence[bool], parameter: str | None
    ) -> NarrowOverflow | None:
        for operand, product, what in _IN_BACKWARD:
            number_format = self._format(layer, product)
            if not finite[operand] and number_format is not None:
                return NarrowOverflow(layer, product, what, number_format)
        for product, is_bad in (
            ("grad", layer == self._bad_result),
            ("wgrad", parameter == f"{layer}.weight"),
        ):
            number_format = self._format(layer, product)
            if is_bad and number_format is not None:
                return NarrowOverflow(layer, product, "result", number_format)
        return None

    def _format(self, layer: str, product: str) -> str | None:
        assert self._layers is not None
        found: str | None = getattr(self._layers.states[layer].formats, product)
        return found


def _is_of(parameter: str, module: str) -> bool:
    return parameter.rpartition(".")[0] == module
