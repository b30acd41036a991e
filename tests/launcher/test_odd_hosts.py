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
    """The second host has other text of equal size, another loss, and a run folder of its own."""
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


@pytest.mark.nightly
def test_a_slow_link_between_hosts_with_names_of_debian(hosts: TwoHosts, tmp_path: Path) -> None:
    """200 ms and 5% loss, and the first host has its name for itself and another default route."""
    hosts.relay("--delay=0.1", "--loss=0.05")
    for words in (
        "link add eth9 type veth peer name other",
        "address add 192.168.9.1/24 dev eth9",
        "link set eth9 up",
        "link set other up",
        "route add default via 192.168.9.254 dev eth9",
    ):
        hosts.run(0, "ip", *words.split())
    names = tmp_path / "hosts"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 one\n")
    words = [*RENDEZVOUS, "--preflight", "--", f"--data.path={corpus(tmp_path / 'data')}"]
    first = hosts.launch(0, *words, mounts=f"mount --bind {names} /etc/hosts")
    first.wait_for("waiting for 1 more host (joined: one (192.168.9.1)), up to 600 s")
    second = hosts.launch(1, *words)
    (first_code, first_output), (second_code, second_output) = first.finish(), second.finish()
    assert first_code == 0, first_output
    assert second_code == 0, second_output
    assert "GLOO_SOCKET_IFNAME=eth0 " in first_output
    assert "--local-addr=10.99.7.1" in first_output
    assert "preflight: the network is slow: " in first_output + second_output
    # torchrun logs no warning about a link that is only slow, or about the end of the run.
    assert not re.search(r"^\[?[WE]\d{4}", first_output + second_output, flags=re.MULTILINE)


@pytest.mark.nightly
def test_an_mtu_black_hole_is_named(hosts: TwoHosts) -> None:
    hosts.relay("--largest=1000")
    words = [*RENDEZVOUS, "--", "--steps=2"]
    first, second = hosts.launch(0, *words), hosts.launch(1, *words)
    code, output = second.finish()
    assert code == 1, output
    assert "cannot send data to the first machine (one, 10.99.7.1): small messages" in output
    assert "Traceback" not in output
    assert first.process.poll() is None
