from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distmp.errors import ConfigError
from distmp.launcher.job import expand


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed")
@pytest.mark.parametrize(
    "text",
    [
        "node1",
        "n[01-03,7],login",
        "n[098-101]",
        "a-b,c.example.org",
        "rack[1-2]n[01-02]",
        "b,a,b",
        "n[1-2],m[3,5-6],n[1-2]",
    ],
)
def test_agrees_with_scontrol(text: str, tmp_path: Path) -> None:
    """scontrol needs a configuration, which containers on compute nodes often lack."""
    configuration = tmp_path / "slurm.conf"
    configuration.write_text(
        "ClusterName=test\nSlurmctldHost=localhost\n"
        "NodeName=localhost\nPartitionName=all Nodes=ALL\n"
    )
    names = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env={**os.environ, "SLURM_CONF": str(configuration)},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split()
    assert expand(text, setting="SLURM_JOB_NODELIST") == names


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
def test_expands_names_and_ranges(text: str, names: str) -> None:
    assert expand(text, setting="SLURM_JOB_NODELIST") == names.split()


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "a,", ",a", "a,,b", "a b", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a-b]"),
        *("n[1,]", "n[[1]]"),
    ],
)
def test_other_texts_are_errors(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"SLURM_JOB_NODELIST = {text!r}: is not")):
        expand(text, setting="SLURM_JOB_NODELIST")


numbers = st.lists(st.integers(0, 120), min_size=1, max_size=12, unique=True).map(sorted)


@given(st.from_regex(r"[a-z][a-z-]{0,5}", fullmatch=True), numbers, st.integers(1, 4))
def test_compression_round_trips(prefix: str, values: list[int], width: int) -> None:
    """The reference compresses as Slurm does: consecutive numbers become ranges."""
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
def test_returns_names_or_raises(text: str) -> None:
    try:
        names = expand(text, setting="x")
    except ConfigError:
        return
    assert names
    assert all(name and not set(name) & set("[], ") for name in names)
