"""Fails if a new torch changes the attributes that `distmp.parallel.fsdp_internals` touches."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule

import distmp
from distmp.distributed import collectives
from distmp.errors import SetupError
from distmp.parallel import fsdp_internals
from tests.parallel.sharding import sharded
from tests.ranks import ranks
from tests.reference import Batch, make_engine


@ranks(2)
def test_unreduced_gradients_are_fp32_and_can_be_discarded() -> None:
    batch = Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))
    for options in (
        sharded("fsdp", accumulate="unsharded"),
        sharded("hsdp", shard_size=1, accumulate="hybrid"),
    ):
        engine = make_engine(policy="bf16", **options)
        module = engine.module
        engine._setup.strategy.begin_step()
        unreduced = []
        for _ in range(2):
            engine._setup.strategy.begin_microbatch(last=False)
            engine._setup.loss(module, batch)[0].backward()
            unreduced.append(
                sum(g.clone().sum() for g in fsdp_internals.unreduced_gradients(module))
            )
        assert {g.dtype for g in fsdp_internals.unreduced_gradients(module)} == {torch.float32}
        torch.testing.assert_close(unreduced[1], 2 * unreduced[0])
        assert all(parameter.grad is None for parameter in module.parameters())
        engine._setup.strategy.begin_step()
        assert fsdp_internals.unreduced_gradients(module) == []


@ranks(2)
def test_building_gathers_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather of all units would take most of the start, and memory for the largest of them."""
    gathers: list[int] = []

    def gather(output: torch.Tensor, *args: Any) -> Any:
        gathers.append(output.numel())
        return original(output, *args)

    original = collectives.all_gather_on_stream
    monkeypatch.setattr(collectives, "all_gather_on_stream", gather)
    engine = make_engine(**sharded("fsdp"))
    assert gathers == []
    engine.step([Batch(torch.ones(3, 6), torch.zeros(3, dtype=torch.int64))])
    assert gathers


def private_names_of_fsdp() -> set[str]:
    """Return the private attributes and modules that torch's FSDP defines."""
    root = Path(fsdp.__file__).parent
    sources = {path.stem: path.read_text() for path in root.rglob("*.py")}
    del sources["sharded_grad_scaler"]  # its private names are those of torch.amp.GradScaler
    attributes = re.findall(r"(?:self\.|def )(_[a-z]\w*)\b", "\n".join(sources.values()))
    names = {name for name in (*attributes, *sources) if name.startswith("_")}
    others = {*dir(torch.nn.Module()), *dir(torch.Tensor)}
    return names - others | {*fsdp_internals.GROUP_ATTRIBUTES, *fsdp_internals.PARAMETER_ATTRIBUTES}


def private_accesses(path: Path, names: set[str]) -> list[str]:
    """Return the attributes, imports and strings of a file that use these names."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found += [node.attr] if node.attr in names and not own else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(fsdp.__name__):
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [part for part in parts if part.startswith("_")]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if f"{fsdp.__name__}._" in node.value else []
            found += [node.value] if node.value in names else []
    return found


def test_only_one_file_touches_private_attributes_of_fsdp() -> None:
    names = private_names_of_fsdp()
    touched = {
        path.name: accesses
        for path in Path(distmp.__file__).parent.rglob("*.py")
        if (accesses := private_accesses(path, names))
    }
    internals = touched.pop("fsdp_internals.py")
    assert {"_handle", "_get_fsdp_state", "_partial_reduce_output"} <= {*internals}
    assert touched == {}


class FSDPParam:
    _unsharded_param = sharded_param = None


@ranks(1)
def test_another_torch_is_refused_by_name() -> None:
    engine = make_engine(strategy="fsdp")
    group: Any = next(fsdp_internals._groups(engine.module))
    fsdp_internals.check(engine.module)
    group.fsdp_params[0] = FSDPParam()
    with pytest.raises(SetupError, match=r"has no .*FSDPParam.unsharded_accumulated_grad"):
        fsdp_internals.check(engine.module)
    del group._partial_reduce_output
    with pytest.raises(SetupError, match=r"FSDPParamGroup._partial_reduce_output"):
        fsdp_internals.check(engine.module)


def test_installed_torch_has_the_public_methods() -> None:
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter", "set_requires_all_reduce"):
        assert hasattr(FSDPModule, name)
    # Since 2.13; distmp works without it before.
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert hasattr(FSDPModule, "reset_iter_state") or version < (2, 13)


def test_the_readme_names_the_versions_that_were_tested() -> None:
    root = Path(__file__).parents[2]
    (version,) = re.findall(r"^torch==(\d+\.\d+)", (root / "constraints.txt").read_text(), re.M)
    assert version in fsdp_internals.TESTED
    tested = (root / "README.md").read_text().partition("\n## Status")[2].partition("\n## ")[0]
    assert set(re.findall(r"\b2\.\d+\b", tested)) == set(fsdp_internals.TESTED)
