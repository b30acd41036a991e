"""The page on GPU benchmarks agrees with the code and the results."""

from __future__ import annotations

import math
import re
from pathlib import Path
from unittest import mock

import torch

from benchmarks.figures import ROOT
from benchmarks.gpu.packages import NEEDED, TARGET
from benchmarks.gpu.slices import LARGE, SLICE_SECONDS, slices
from distmp.precision.policy import SCALINGS
from distmp.quantization.products import choose_product, emulated_product

PAGE = (ROOT / "docs" / "gpu.md").read_text()
SLICES = slices("350m", LARGE, Path("out"))
NUMBERS = ("one", "two", "three", "four", "five", "six")


def test_time_on_page_agrees_with_slices() -> None:
    assert f"{NUMBERS[len(SLICES) - 1]} slices of at most {SLICE_SECONDS // 60} minutes" in PAGE
    limits = [sum(job.limit for job in part.jobs) for part in SLICES]
    text = " ".join(PAGE.split())
    assert f"The first three take at most {math.ceil(sum(limits[:3]) / 60)} minutes" in text
    assert f"all five at most {math.ceil(sum(limits) / 60)} minutes" in text
    assert f"at most {SLICE_SECONDS // 60} minutes" in (ROOT / "Makefile").read_text()


def test_packages_on_page_agree_with_needed() -> None:
    download = re.search(r"pip download .* constraints.txt (.*)", PAGE)
    installed = re.search(r"^lacks\. (.*) are usually installed", PAGE, flags=re.MULTILINE)
    assert download is not None
    assert installed is not None
    names = [*download[1].split(), *re.split(r", | and ", installed[1])]
    assert sorted(names) == sorted(NEEDED)
    assert f"`{TARGET.relative_to(ROOT)}`" in PAGE


def test_table_names_every_part_that_no_real_device_ran() -> None:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$", table(), flags=re.MULTILINE)
    assert len(rows) > 8
    known = ("one rank", "one GPU", "never run", "does not exist")
    assert all(row.startswith(known) for row in rows[1:])
    cuda = torch.device("cuda")
    with mock.patch("torch.cuda.get_device_capability", return_value=(10, 0)):
        kernels = {each: choose_product(each, "e4m3", cuda) for each in SCALINGS}
    emulated = [each for each, product in kernels.items() if product is emulated_product]
    assert emulated == ["block32", "block16"]


def table() -> str:
    return PAGE.partition("## What is tested where")[2].partition("## Results")[0]
