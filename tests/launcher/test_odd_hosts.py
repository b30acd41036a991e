"""Runs on two simulated hosts with odd networks, names, files and disks; see `two_hosts`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.two_hosts import TwoHosts, two_hosts
from tests.torchrun import TINY, corpus

RENDEZVOUS = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-endpoint=one:29400")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.mark.nightly
def test_hosts_with_other_files_are_refused(hosts: TwoHosts, tmp_path: Path) -> None:
    """The second host has other text of equal size, another loss, and its own run directory."""
    data, runs, own = corpus(tmp_path / "data"), tmp_path / "runs", tmp_path / "own"
    (tmp_path / "losses.py").write_text("from distmp.models import next_token_loss as mine\n")
    runs.mkdir()
    (own / "runs").mkdir(parents=True)
    shutil.copytree(data, own / "data")
    text = (own / "data" / "text3.py").read_text()
    (own / "data" / "text3.py").write_text(text.replace("first", "third", 1))
    (own / "losses.py").write_text("from distmp.models import next_token_loss as mine  # other\n")
    words = [*RENDEZVOUS, "--", *TINY, f"--data.path={data}", "--model.loss=losses:mine"]
    words += [f"--run-dir={runs}/run", "--steps=2"]
    different = "; ".join(
        f"mount --bind {own / name} {tmp_path / name}" for name in ("data", "runs", "losses.py")
    )
    first, second = hosts.launch(0, *words), hosts.launch(1, *words, mounts=different)
    (first_code, first_output), (second_code, second_output) = first.finish(), second.finish()
    together = first_output + second_output
    assert first_code == 2, together
    assert second_code != 0, together
    (message,) = re.findall(r"preflight: (.*)", together)
    assert re.search(
        r"files of the code differ: losses\.py differs: \d+ bytes \w+ on rank 0 \(one\), \d+ bytes "
        r"\w+ on rank 1 \(two\)",
        message,
    )
    assert f"{data}/text3.py differs: 2,000 bytes " in message
    assert "text2.py" not in message
    assert (
        f"run_dir = '{runs}/run' is not the same directory on all machines: rank 1 (two)" in message
    )
    assert "checkpoint.path" in message
    # Nothing is left behind.
    assert [*runs.iterdir(), *(own / "runs").iterdir()] == []
