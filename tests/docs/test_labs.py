"""The labs: notebooks equal scripts, scripts run, and their numbers agree with references.

`make docs` executes the notebooks, so only `make nightly` runs the scripts.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.figures import ROOT
from tests.torchrun import python, run

NOTEBOOKS = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))
LABS = {script.stem.partition("_")[0]: script for script in NOTEBOOKS["SCRIPTS"]}
INDEX = (ROOT / "docs" / "labs.md").read_text()
EVALUATE = """
import runpy, sys, torch
names = runpy.run_path(sys.argv[1], run_name="__main__")
torch.save([eval(text, names) for text in sys.argv[2:]], "values.pt")
"""


def executed(lab: str, directory: Path, *expressions: str) -> list[Any]:
    """Run a lab's script; return what it prints, and values of expressions over its names."""
    command = python("-c", EVALUATE, str(LABS[lab]), *expressions)
    result = run(command, cwd=directory, variables={"MPLBACKEND": "agg"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Warning" not in result.stderr
    (picture,) = directory.glob("*.png")
    assert picture.stat().st_size > 10_000
    return [result.stdout, *torch.load(directory / "values.pt")]


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


@pytest.mark.parametrize("lab", LABS)
def test_notebook_equals_script(lab: str) -> None:
    target = NOTEBOOKS["target"](LABS[lab])
    assert target.read_text() == NOTEBOOKS["notebook"](LABS[lab]), "run `make notebooks`"


def test_directory_has_no_other_notebook() -> None:
    found = {path.stem for path in (ROOT / "docs" / "labs").iterdir()}
    assert found == {script.stem for script in LABS.values()}
    assert len(found) == 5


@pytest.mark.parametrize("lab", LABS)
def test_notebook_installs_asks_and_links(lab: str) -> None:
    path = NOTEBOOKS["target"](LABS[lab])
    cells = nbformat.read(path, as_version=4).cells
    question, install, *_, last = cells
    assert question.source.splitlines()[0].startswith("# ")
    assert question.source.splitlines()[0].endswith("?")
    assert install.source == "%pip install --quiet distmp matplotlib"
    assert all(not cell.get("outputs") for cell in cells)
    (picture,) = (cell for cell in cells if "savefig" in cell.source)
    assert len(picture.metadata["mystnb"]["image"]["alt"].split()) > 10
    links = re.findall(r"\]\(([^)#]+)", last.source.partition("Read on: ")[2])
    assert len(links) == 2
    for link in links:
        assert (path.parent / link).is_file()


@pytest.mark.parametrize("lab", LABS)
def test_page_lists_lab(lab: str) -> None:
    stem = LABS[lab].stem
    title = re.findall(r"^# # (.*)", LABS[lab].read_text(), re.MULTILINE)[0]
    assert f"[{title}](labs/{stem}.ipynb)" in INDEX
    assert f"(../examples/labs/{stem}.py)" in INDEX
    assert f"\nlabs/{stem}\n" in INDEX


@pytest.mark.nightly
def test_float16_loses_gradients_that_the_scale_keeps(tmp_path: Path) -> None:
    printed, inputs, labels, parameters, in_float32, *in_float16 = executed(
        "01",
        tmp_path,
        "inputs",
        "labels",
        "[parameter.detach() for parameter in model.parameters()]",
        "backward(torch.float32)",
        "backward(torch.float16, 1.0)",
        "backward(torch.float16, 65536.0)",
    )
    parameters = [parameter.double().requires_grad_() for parameter in parameters]
    outputs = [inputs.double()]
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        outputs += [outputs[-1] @ weight.T + bias]
        outputs += [outputs[-1].relu()]
    _, *activations, _ = outputs  # the last layer has no ReLU
    loss = cross_entropy(activations[-1], labels)
    found = torch.autograd.grad(loss, [*activations[::-1], *parameters])
    exact, exact_weights = flat(found[: len(activations)]), flat(found[len(activations) :])
    assert relative_error(in_float32[0], exact) < 1e-3
    assert relative_error(in_float32[1], exact_weights) < 1e-3
    errors = []
    # The lab prints numbers of the step before, which are close but for the last digits.
    rows = re.findall(r"loss scale (\d+): (\S+)% .*\n.* error of (\S+)%", printed)
    for (scale, lost, _), (of_activations, of_weights) in zip(rows, in_float16, strict=True):
        share = 1 - of_activations.count_nonzero() / exact.count_nonzero()
        assert share == pytest.approx(float(lost) / 100, abs=0.02)
        rounded = 1 - (exact * float(scale)).half().count_nonzero() / exact.count_nonzero()
        assert share == pytest.approx(rounded.item(), abs=0.02)
        errors.append(relative_error(of_weights, exact_weights))
    assert [float(lost) > 50 for _, lost, _ in rows] == [True, False]
    for error, error_with_scale in (errors, [float(error) / 100 for *_, error in rows]):
        assert error > 0.1
        assert error_with_scale < 0.02


@pytest.mark.nightly
def test_ranks_diverge_with_torch_and_agree_with_distmp(tmp_path: Path) -> None:
    printed, scales, differences = executed("02", tmp_path, "scales", "differences")
    before, after = [2.0**16] * 9, [2.0**15] * 21
    assert scales["torch"] == [[2.0**16] * 30, before + after]
    assert scales["distmp"] == [before + after] * 2
    assert differences["distmp"].tolist() == [0.0] * 30
    assert differences["torch"][:9].tolist() == [0.0] * 9
    assert differences["torch"][9:].min() > 1e-3
    assert "torch: loss scales 65536 and 32768" in printed
    assert "and 32768,\n  largest difference of the shared weights 0, 0.0% of the" in printed


@pytest.mark.nightly
def test_mean_of_means_has_error_of_one_computed_in_float64(tmp_path: Path) -> None:
    printed, errors, batches, parameters = executed(
        "03",
        tmp_path,
        "errors",
        "[batch for rank in range(2) for batch in microbatches(rank)]",
        "[parameter.detach().double() for parameter in build().parameters()]",
    )
    embedding, weight, bias = (parameter.requires_grad_() for parameter in parameters)
    losses = [
        cross_entropy(embedding[inputs] @ weight.T + bias, labels, reduction="none")
        for inputs, labels in batches
    ]
    assert [len(loss) for loss in losses] == [60, 12, 48, 20]
    exact, mean_of_means = (
        flat(torch.autograd.grad(loss, parameters, retain_graph=True))
        for loss in (torch.cat(losses).mean(), sum(loss.mean() for loss in losses) / len(losses))
    )
    error = relative_error(mean_of_means, exact)
    assert error > 0.2
    assert errors["mean of means"] == pytest.approx(error, rel=1e-4)
    assert errors["global_mean"] < 1e-6
    assert f"mean of means: error of the gradient {error:.3g};\n" in printed
    cosine = torch.nn.functional.cosine_similarity(mean_of_means, exact, dim=0)
    assert cosine < 0.95
    shown = f"{mean_of_means.norm() / exact.norm():.3f} times .* their cosine {cosine:.3f}\n"
    assert re.search(shown, printed)


@pytest.mark.nightly
def test_buckets_sum_like_float64_where_grad_rounds(tmp_path: Path) -> None:
    gradients = "torch.autograd.grad(loss(model, x), [*model.parameters()])"
    printed, each, in_grad, in_buckets, counts, errors, memory = executed(
        "04",
        tmp_path,
        f"[torch.cat([g.flatten() for g in {gradients}]) for x in microbatches[:16]]",
        "in_grad(16)[0]",
        "in_buckets(16)[0]",
        "counts",
        "errors",
        "memory",
    )
    exact, rounded = torch.stack(each).double().sum(dim=0), torch.zeros_like(each[0])
    for gradient in each:
        rounded += gradient
    assert torch.equal(in_grad, rounded)
    found = [relative_error(total, exact) for total in (in_grad, in_buckets)]
    names = ("bfloat16 .grad", "FP32 buckets")
    assert [errors[name][counts.index(16)] for name in names] == pytest.approx(found)
    assert re.search(rf"^ *16 +{found[0]:.1e} +{found[1]:.1e}$", printed, re.MULTILINE)
    losses = [float(loss) for loss in re.findall(r"^mean loss of a sample: (.*)$", printed, re.M)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    assert errors["bfloat16 .grad"][-1] > errors["bfloat16 .grad"][counts.index(16)] > 1e-3
    assert max(errors["FP32 buckets"]) < 1e-6
    assert memory["bfloat16 .grad"] == 2
    assert memory["FP32 buckets"] == pytest.approx(4, rel=0.05)  # buckets are padded


@pytest.mark.nightly
def test_cost_agrees_with_formulas(tmp_path: Path) -> None:
    fields = ("parameters", "memory_bytes", "communication_bytes", "between_machines_bytes")
    reading = f"{{name: getattr(run, name) for name in {fields}}}"
    each = f"{{name.split()[-1]: {reading} for name, run in found.items()}}"
    _, found = executed("05", tmp_path, each)
    parameters = found["ddp"]["parameters"]
    ring = 63 / 64  # of the bytes of a tensor, for a reduce-scatter or an all-gather
    sent = {name: run["communication_bytes"] / parameters for name, run in found.items()}
    # FP32 gradients are reduced; 16-bit weights are gathered.
    assert sent["ddp"] == pytest.approx(2 * 4 * ring, rel=0.01)
    assert sent["shard_optimizer"] == pytest.approx((4 + 2) * ring, rel=0.01)
    memory = {name: run["memory_bytes"] / parameters for name, run in found.items()}
    assert memory["ddp"] - memory["shard_optimizer"] == pytest.approx(12 * ring, rel=0.1)
    # fsdp gathers 16-bit weights for forward and for backward of each of 4 microbatches, reduces
    # their gradients, and divides all of the state.
    assert sent["fsdp"] == pytest.approx(4 * (4 + 2 + 2) * ring, rel=0.01)
    assert memory["fsdp"] < memory["shard_optimizer"] - (2 + 4) * ring + 1
    for values in found.values():  # one hop of each ring of 8 ranks leaves the machine
        share = values["between_machines_bytes"] / values["communication_bytes"]
        assert share == pytest.approx(1 / 8, rel=0.1)
    assert (tmp_path / "runs" / "lab" / "report.html").stat().st_size > 10_000
