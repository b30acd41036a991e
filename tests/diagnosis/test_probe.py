from __future__ import annotations

import math
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.diagnosis.attribution import ForwardOverflow
from distmp.diagnosis.histogram import ExponentHistogram
from distmp.diagnosis.replay import (
    GradientSummary,
    Probe,
    count_non_finite,
    first_overflows,
    non_finite_rows,
)


def units(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [("", module)]


def number_of_hooks(module: nn.Module) -> int:
    """Count the hooks on modules and parameters in torch's private dictionaries."""
    tables = [
        table
        for part in module.modules()
        for table in (part._forward_hooks, part._forward_pre_hooks)
    ]
    tables += [parameter._backward_hooks or {} for parameter in module.parameters()]
    return sum(map(len, tables))


def test_probed_gradients_agree_with_backward() -> None:
    model = nn.Linear(2, 3, bias=False)
    model.weight.grad = torch.full((3, 2), math.nan)  # of an earlier backward
    factors = torch.tensor([[1.0, math.inf], [-math.inf, math.nan], [-4.0, 0.0]])
    with Probe(model, units(model)) as probe:
        (model.weight * factors).sum().backward()
    assert probe.gradients() == {"weight": GradientSummary(inf=2, nan=1, largest_finite=4.0)}
    counted = ExponentHistogram(probe.exponents)
    assert (dict(counted.exponents), counted.infinite, counted.nan) == ({0: 1, 2: 1}, 2, 1)


def test_parameters_are_in_backward_order() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    with Probe(model, units(model)) as probe:
        model(torch.ones(1, 2)).sum().backward()
    assert next(iter(probe.gradients())) == "1.weight"
    assert sorted(probe.gradients()) == ["0.bias", "0.weight", "1.weight"]


def test_tied_weight_is_seen_once_with_full_gradient() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with Probe(model, units(model)) as probe:
        model(torch.ones(1, 2)).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    largest = gradient.abs().max().item()
    assert probe.gradients() == {"0.weight": GradientSummary(0, 0, largest)}


def test_frozen_unused_and_empty_parameters_are_handled() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    model["used"].bias.requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0)))
    with Probe(model, units(model)) as probe:
        (model["used"](torch.ones(1, 2)).sum() + model.empty.sum()).backward()
    assert list(probe.gradients()) == ["used.weight"]


def test_non_finite_parameters_are_found() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.bias[1] = math.nan
    with Probe(model, units(model)) as probe:
        model(torch.ones(1, 2))
    assert probe.bad_parameters == ["bias"]


def test_parameters_overwritten_in_forward_are_found() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    @torch.no_grad()
    def spoil(module: nn.Module, args: object) -> None:
        module.weight[0, 0] = math.inf

    model[1].register_forward_pre_hook(spoil)
    with Probe(model, units(model)) as probe:
        model(torch.ones(1, 2))
    assert probe.bad_parameters == ["1.weight"]
    assert probe.forward == ForwardOverflow("1", "output")


class Between(nn.Module):
    """Overflows between its two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x) * 1e30 * 1e30)


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Identity(), Between()), ForwardOverflow("1.two", "input")),
        (nn.Sequential(Exponential(), Exponential(), nn.ReLU()), ForwardOverflow("1", "output")),
        (nn.Sequential(nn.Identity(), nn.ReLU()), None),
    ],
)
def test_first_non_finite_module_is_found(
    model: nn.Module, expected: ForwardOverflow | None
) -> None:
    with Probe(model, units(model)) as probe:
        model(torch.full((1, 2), 5.0))
    assert probe.forward == expected


def test_hooks_are_removed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with Probe(model, units(model)):
        model(torch.ones(1, 2)).sum().backward()
        assert number_of_hooks(model) > 0
    assert number_of_hooks(model) == 0
    with pytest.raises(RuntimeError), Probe(model, units(model)):
        model(torch.ones(1, 3))
    assert number_of_hooks(model) == 0


def test_non_finite_values_are_counted() -> None:
    mask = torch.tensor([0.0, -math.inf])
    batch = {"mask": mask, "tokens": torch.tensor([1, 2]), "x": [torch.tensor(math.nan)], "f": 1.0}
    assert count_non_finite(batch) == count_non_finite([UserDict(batch)]) == 2
    assert count_non_finite(batch, but_negative_inf=True) == 1
    assert count_non_finite((F.relu(mask), None, "text")) == 0


STORED = torch.tensor([[0.0, math.inf], [math.nan, 1.0], [-math.inf, 2.0]])


@pytest.mark.parametrize(
    ("tensor", "rows"),
    [
        (STORED.to_sparse(), []),
        (torch.sparse_coo_tensor([[0, 0, 1]], STORED, (2, 2)), []),  # not coalesced
        (STORED.to_sparse_csr(), []),
        (torch.nested.as_nested_tensor([STORED[:1], STORED[1:]], layout=torch.jagged), []),
        (torch.nested.as_nested_tensor([STORED[:1], STORED[1:]]), []),
        (STORED.to(torch.float8_e5m2), [0, 1]),
    ],
)
def test_values_of_other_layouts_and_dtypes_are_counted(tensor: Tensor, rows: list[int]) -> None:
    assert count_non_finite([tensor]) == 3
    assert count_non_finite([tensor], but_negative_inf=True) == 2
    assert non_finite_rows([tensor], but_negative_inf=True) == rows


class Compiled(nn.Module):
    """Has the names of a model of `torch.compile`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(x)


def test_names_are_those_of_the_model_that_was_compiled() -> None:
    for model, module, name in (
        (Compiled(nn.Linear(2, 2)), "", "weight"),
        (Compiled(nn.Sequential(nn.ReLU(), Compiled(nn.Linear(2, 2)))), "1", "1.weight"),
    ):
        with Probe(model, units(model)) as probe:
            model(torch.full((1, 2), math.inf)).sum().backward()
        assert probe.forward is not None
        assert probe.forward.module == ("" if not module else "0")
        (first,) = first_overflows([probe.gradients()], rank=0)
        assert (first.name, first.module) == (name, module)


def test_first_rows_with_non_finite_values_are_found() -> None:
    x = torch.zeros(9, 2, 2)
    x[[3, 4, 6, 8], 1, 0] = math.nan
    x[4, 0, 1] = math.inf
    batch = {"scalar": torch.tensor(math.nan), "mask": torch.tensor([0.0, -math.inf]), "x": x}
    assert non_finite_rows(batch, but_negative_inf=True) == [3, 4, 6]
    assert non_finite_rows(batch) == [1]
    assert non_finite_rows([torch.zeros(0, 2), torch.ones(2)]) == []
