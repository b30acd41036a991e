"""Formats that the engine logs at the start, and layers with formats that nothing calls."""

from __future__ import annotations

import logging
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distmp.engine.engine import Engine
from distmp.errors import ConfigError
from distmp.precision import policy
from distmp.quantization.layers import describe_formats, formats_record, log_formats
from tests.reference import fused_adamw

WIDTH = 32


class Model(nn.Module):
    """Calls its first layer, and uses only the weights of the others, or nothing."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for layer in [*self.layers][1:]:
            x = F.linear(x, layer.weight, layer.bias)
        return self.head(x)


def make_engine(model: nn.Module, policy: str = "fp8", **options: bool) -> Engine:
    def loss(module: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return module(x).sum(), len(x)

    return Engine(model, loss, fused_adamw, policy=policy, device="cpu", **options)


def test_layers_that_are_not_called_are_named_once() -> None:
    engine = make_engine(Model(3))
    message = "no rank called the linear layers 'layers.1', 'layers.2' in the first step"
    with pytest.warns(RuntimeWarning, match=re.escape(message)):
        engine.step([torch.ones(4, WIDTH)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([torch.ones(4, WIDTH)])


def test_many_layers_are_counted() -> None:
    engine = make_engine(Model(8))
    with pytest.warns(RuntimeWarning, match=r"'layers.5' and 2 more in the first step"):
        engine.step([torch.ones(4, WIDTH)])


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("fp8,hp=head|layers.1|layers.2", {}),
        ("bf16", {}),
        ("fp8", {"first_step_checks": False}),
    ],
)
def test_no_warning_if_all_layers_are_called(policy: str, options: dict[str, bool]) -> None:
    engine = make_engine(Model(3), policy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([torch.ones(4, WIDTH)])


@pytest.mark.parametrize("policy", ["bf16,grad=e5m2", "bf16,wgrad=e5m2"])
def test_called_layers_without_low_precision_gradients_are_not_named(policy: str) -> None:
    model = Model(1)
    # Its input needs no gradient in either case.
    model.layers[0].requires_grad_(policy == "bf16,grad=e5m2")
    engine = make_engine(model, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step([torch.ones(4, WIDTH)])


@pytest.mark.parametrize("policy", ["fp8", "fp8-rowwise", "mxfp8,hp=none", "nvfp4,hp=none"])
def test_a_step_without_samples(policy: str) -> None:
    engine = make_engine(Model(1), policy)
    none, some = torch.ones(0, WIDTH), torch.ones(4, WIDTH)
    norms = []
    for batches in ([some], [some, none]):
        torch.manual_seed(0)
        engine = make_engine(Model(1), policy)
        norms.append(engine.step(batches).numbers.grad_norm)
    assert norms[0] == norms[1] > 0
    assert engine.step([none]).numbers.weight == 0


def test_formats_of_layers_are_described(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "distmp")
    engine = make_engine(Model(2), "fp8-rowwise,wgrad=bf16,name=mine")
    layers = engine.low_precision_matmuls.layers
    assert layers is not None
    text = (
        "forward e4m3, grad e4m3, wgrad bf16, scaling row; 2 of 3 linear layers have "
        "low-precision matmuls, emulated; in the compute dtype: head (hp=head)"
    )
    assert describe_formats(layers) == text
    assert f"precision mine: {text}" in caplog.messages
    assert formats_record(layers) == {
        "formats": ["forward e4m3, grad e4m3, wgrad bf16, scaling row"],
        "emulated": True,
        "backend": "emulated",
        "low_precision": ["layers.0", "layers.1"],
        "high_precision": {"head": "hp=head"},
    }


def test_gpu_without_a_compiler_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    layers = make_engine(Model(1), "fp8").low_precision_matmuls.layers
    assert layers is not None
    layers.is_emulated = False
    cases = (("cuda", False, True), ("cuda", True, False), ("cpu", False, False))
    for device, compiled, warns in cases:
        caplog.clear()
        log_formats(layers, policy("fp8"), torch.device(device), compiled=compiled)
        assert ("fp8 is slower than bf16 without a compiler" in caplog.text) is warns


def test_a_forward_that_is_replaced_later_is_refused() -> None:
    model = Model(1)
    engine = make_engine(model)
    engine.step([torch.ones(4, WIDTH)])
    model.layers[0].forward = lambda x: F.linear(x, model.head.weight)
    with pytest.raises(ConfigError, match=r"model = 'layers\.0\.forward': was replaced"):
        engine.step([torch.ones(4, WIDTH)])


def test_engines_do_not_share_a_low_precision_layer() -> None:
    shared = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    first = make_engine(nn.Sequential(shared, nn.Linear(WIDTH, WIDTH)))
    first.step([torch.ones(4, WIDTH)])
    make_engine(nn.Sequential(shared, nn.Linear(WIDTH, WIDTH)), "bf16")
    with pytest.raises(ConfigError, match=r"model = '0\.forward': was replaced .* another engine"):
        first.step([torch.ones(4, WIDTH)])
