from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.launcher.nodelist import expand


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", "node1"),
        ("n[01-03,7],login", "n01 n02 n03 n7 login"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("a-b,c.example.org", "a-b c.example.org"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("gpu[3]-ib", "gpu3-ib"),
        ("b,a,b", "b a b"),
    ],
)
def test_expands_as_scontrol_does(text: str, names: str) -> None:
    assert expand(text, setting="SLURM_JOB_NODELIST") == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a-b]"),
        *("n[1,]", "n[[1]]", "n[1-9999999999]", "n[1-999][1-999]"),
    ],
)
def test_anything_else_is_one_message(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_JOB_NODELIST = {text!r}: is not")):
        expand(text, setting="SLURM_JOB_NODELIST")


numbers = st.lists(st.integers(0, 120), min_size=1, max_size=12, unique=True).map(sorted)


@given(st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True), numbers, st.integers(1, 4))
def test_what_is_compressed_comes_back(prefix: str, values: list[int], width: int) -> None:
    """The reference is a compression as Slurm does it: runs of numbers become ranges."""
    ranges: list[list[int]] = []
    for value in values:
        # Slurm writes numbers of different widths as different ranges.
        if ranges and ranges[-1][-1] == value - 1 and len(f"{value:0{width}}") == width:
            ranges[-1].append(value)
        else:
            ranges.append([value])
    parts = [
        f"{run[0]:0{width}}" + (f"-{run[-1]:0{width}}" if len(run) > 1 else "") for run in ranges
    ]
    expected = [f"{prefix}{value:0{width}}" for value in values]
    assert expand(f"{prefix}[{','.join(parts)}]", setting="x") == expected


@given(st.text(alphabet="n1-,[]0 ", max_size=20))
def test_never_anything_but_names_or_an_error(text: str) -> None:
    try:
        names = expand(text, setting="x")
    except ConfigError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)
