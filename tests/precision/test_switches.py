from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distmp.optim import muon
from distmp.precision import PRESETS, policy
from distmp.precision.keep import product_switches

backends: Any = torch.backends
matmul = backends.cuda.matmul
PRODUCTS = (matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def state() -> dict[str, Any]:
    """Return every switch by name; the older ones if torch can read them."""
    found: dict[str, Any] = {"products": [part.fp32_precision for part in PRODUCTS]}
    for name in SUMS:
        split_k = getattr(matmul, f"{name}_split_k", None)  # not in every version of torch
        found[name] = getattr(matmul, name) if split_k is None else (getattr(matmul, name), split_k)
    older: dict[str, Callable[[], Any]] = {
        "matmul": torch.get_float32_matmul_precision,
        "cudnn": lambda: backends.cudnn.allow_tf32,
    }
    for name, read in older.items():
        try:
            found[name] = read()
        except RuntimeError:
            found[name] = None
    return found


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = state()
    yield
    torch.set_float32_matmul_precision(before["matmul"])
    backends.cudnn.allow_tf32 = before["cudnn"]
    for part, value in zip(PRODUCTS, before["products"], strict=True):
        part.fp32_precision = value
    for name in SUMS:
        setattr(matmul, name, before[name])
    assert state() == before


def older_api(precision: str, tf32: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    backends.cudnn.allow_tf32 = tf32


def newer_api(precision: str) -> None:
    for part in PRODUCTS[:3]:
        part.fp32_precision = precision


SETTINGS: dict[str, Callable[[], None]] = {
    "nothing set": lambda: None,
    "older: highest": lambda: older_api("highest", False),
    "older: high": lambda: older_api("high", True),
    "older: medium": lambda: older_api("medium", False),
    "newer: tf32": lambda: newer_api("tf32"),
    "newer: ieee": lambda: newer_api("ieee"),
    "sums": lambda: setattr(matmul, SUMS[0], False),
}


@pytest.mark.parametrize("before", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("name", PRESETS)
def test_matmul_switches_are_set_and_restored(name: str, before: Callable[[], None]) -> None:
    before()
    found = state()
    with product_switches(policy(name)):
        inside = state()
    tf32 = name == "tf32"
    assert inside["products"] == ["tf32" if tf32 else "ieee"] * 4
    assert inside["matmul"] == ("high" if tf32 else "highest")
    assert inside["cudnn"] is tf32
    assert all(inside[switch] in (False, (False, True)) for switch in SUMS)
    after = state()
    # An older switch that was not readable may be readable now, with the value of the newer one.
    assert {key: value for key, value in after.items() if found[key] is not None} == {
        key: value for key, value in found.items() if value is not None
    }


def test_matmul_switches_are_restored_after_error() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), product_switches(policy("tf32")):
        1 / 0  # noqa: B018
    assert state() == before


def test_matmul_switches_can_be_nested() -> None:
    before = state()
    with product_switches(policy("tf32")):
        with product_switches(policy("bf16")):
            assert not matmul.allow_tf32
        assert matmul.allow_tf32
    assert state() == before


def test_muon_has_full_precision_under_all_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[dict[str, Any]] = []
    monkeypatch.setattr(muon, "orthogonalized", lambda x: (inside.append(state()), x)[1])
    older_api("medium", True)
    before = state()
    weight = torch.ones(3, 4, requires_grad=True)
    weight.grad = torch.ones(3, 4)
    muon.Muon([("layer.weight", weight)]).step()
    assert [(each["products"], each["matmul"]) for each in inside] == [(["ieee"] * 4, "highest")]
    assert state() == before


@pytest.mark.gpu
@pytest.mark.real_gpu
def test_gpu_matmuls_follow_switches() -> None:
    """TF32 has 10 bits of mantissa, FP32 23."""
    torch.manual_seed(0)
    x, y = torch.randn(2, 512, 512, device="cuda")
    exact = x.double() @ y.double()
    errors = {}
    for name in ("fp32", "tf32"):
        with product_switches(policy(name)):
            errors[name] = float(((x @ y).double() - exact).norm() / exact.norm())
    assert errors["fp32"] < 1e-6
    assert 1e-5 < errors["tf32"] < 1e-3
