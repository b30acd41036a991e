"""`distmp launch --hosts`: its commands, with a replacement for ssh, and on two hosts."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from distmp.errors import ConfigError
from distmp.launcher.hosts import Host, HostsPlan, _Agent, plan_hosts, read_hosts, run_on_hosts
from distmp.launcher.network import AddressError
from distmp.launcher.plan import UserOptions
from tests import two_hosts
from tests.launcher.networks import network
from tests.progress import wait_until
from tests.torchrun import TINY, corpus, environment, python
from tests.two_hosts import NAMES, TwoHosts

NODES = [Host(f"node{n}") for n in range(60)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [Host("a")]),
        ("a,me@b:4", [Host("a"), Host("me@b", 4)]),
        (",".join(host.name for host in NODES), NODES),
        ("10.0.0.1, n-2.example.org", [Host("10.0.0.1"), Host("n-2.example.org")]),
    ],
)
def test_hosts_are_read_from_list(text: str, expected: list[Host]) -> None:
    assert read_hosts(text) == expected


def test_hosts_are_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("# ours\na:2\n\n  b   # the new one\nc:3\n")
    assert read_hosts(str(file)) == [Host("a", 2), Host("b"), Host("c", 3)]


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,a", "a b", "a:0", "a:x", "-oProxyCommand=x", "-v", "a;b", "no/such/file"],
)
def test_invalid_host_lists_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        read_hosts(text)


def test_signal_may_interrupt_the_writing_of_another() -> None:
    received, sent = os.pipe()

    class Interrupted(io.FileIO):
        def write(self, data: Any, /) -> int | None:
            agent.send_signal(signal.SIGTERM)
            return super().write(data)

    stdin = io.TextIOWrapper(io.BufferedWriter(Interrupted(sent, "wb")))
    agent = _Agent("a", cast("Any", SimpleNamespace(stdin=stdin)))
    with open(received, "rb", buffering=0) as pipe, stdin:
        agent.send_signal(signal.SIGINT)
        assert pipe.read(100) == b"SIGINT\n"


def test_binary_host_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"--hosts = .*: cannot be read \(it is not text\)"):
        read_hosts(str(tmp_path / "hosts"))


# A replacement for ssh: knows `alias`, and runs commands locally.
FAKE_SSH = """\
#!/bin/sh
while [ "${1#-o}" != "$1" ]; do shift; done
if [ "$1" = -G ]; then
    [ "$2" = alias ] && set -- -G 10.0.0.3
    echo "hostname $2"
    exit
fi
[ "$1" = unreachable ] && { echo "ssh: connect to host unreachable: timed out" >&2; exit 255; }
shift
exec sh -c "$1"
"""


@pytest.fixture
def ssh(tmp_path: Path) -> list[str]:
    script = tmp_path / "ssh"
    script.write_text(FAKE_SSH)
    script.chmod(0o755)
    return [str(script)]


def words(plan: HostsPlan, host: str) -> list[str]:
    """Return the words of a host's command."""
    *_, name, remote = plan.commands[host]
    assert name == host
    return shlex.split(remote)


def test_each_launch_uses_another_port(ssh: list[str]) -> None:
    """Also if the name of the run is the same: others must not predict it."""
    given = UserOptions(rdzv_id="run")
    plans = [plan_hosts([Host("n1"), Host("n2")], ssh, given, [], network(), {}) for _ in range(8)]
    endpoints = {plan.options[1].value for plan in plans}
    assert all(endpoint.startswith("--rdzv-endpoint=10.0.0.1:2") for endpoint in endpoints)
    assert len(endpoints) > 1


def test_every_host_gets_rendezvous_endpoint(ssh: list[str]) -> None:
    variables = {"NCCL_DEBUG": "INFO", "HOME": "/root", "PET_LOG_DIR": "a b"}
    given = UserOptions(arguments=("--max-restarts", "1"), port=4321)
    plan = plan_hosts(
        [Host("alias", 2), Host("n1")], ssh, given, ["--seed", "2"], network(), variables
    )
    first, second = words(plan, "alias"), words(plan, "n1")
    assert first[:3] == ["cd", str(Path.cwd()), "&&"]
    assert first[4:7] == ["env", "NCCL_DEBUG=INFO", "PET_LOG_DIR=a b"]
    # ssh's configuration knows the address behind an alias.
    assert "--rdzv-endpoint=10.0.0.3:4321" in first
    assert first[-5:] == ["--max-restarts", "1", "--", "--seed", "2"]
    own = {"--node-rank=0", "--node-rank=1", "--nproc-per-node=2"}
    assert [word for word in first if word not in own] == [w for w in second if w not in own]
    assert own & set(first) == {"--node-rank=0", "--nproc-per-node=2"}
    assert own & set(second) == {"--node-rank=1"}
    description = plan.describe()
    assert shlex.join(plan.commands["alias"]) in description.splitlines()
    assert "first of --hosts; port: --port" in description


def test_user_options_are_forwarded_to_hosts(ssh: list[str]) -> None:
    options = ("--nnodes=1:2", "--rdzv-endpoint=h:1", "--rdzv-id=x")
    given = UserOptions(arguments=options, nnodes=(1, 2), rdzv_endpoint="h:1", rdzv_id="x")
    plan = plan_hosts([Host("n1"), Host("n2")], ssh, given, [], network(), {})
    assert plan.options == ()
    assert plan.min_nodes == 1
    assert words(plan, "n1")[-4:] == [*options, "--"]
    assert "# environment: hosts" in plan.describe()


def test_first_host_without_address_is_refused(ssh: list[str]) -> None:
    with pytest.raises(AddressError, match="'n9'"):
        plan_hosts([Host("n9"), Host("n1")], ssh, UserOptions(), [], network(), {})


def test_other_rendezvous_with_hosts_is_refused(ssh: list[str]) -> None:
    for given in (UserOptions(own_rendezvous="master_addr"), UserOptions(node_rank=0)):
        with pytest.raises(ConfigError, match="leave out --"):
            plan_hosts([Host("n1")], ssh, given, [], network(), {})


@pytest.mark.parametrize("nnodes", [(3, 3), (3, 4)])
def test_more_nodes_than_hosts_are_refused(ssh: list[str], nnodes: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="--nnodes = 3: --hosts names only 2; add hosts"):
        plan_hosts([Host("n1"), Host("n2")], ssh, UserOptions(nnodes=nnodes), [], network(), {})


class Running(subprocess.Popen[str]):
    """Runs a Python program."""

    def __init__(self, program: str) -> None:
        words, pipe = [sys.executable, "-c", textwrap.dedent(program)], subprocess.PIPE
        streams = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
        super().__init__(words, text=True, env=environment(), **streams)  # type: ignore[call-overload]

    def line(self) -> str:
        """Return the next line of its output."""
        assert self.stdout is not None
        return self.stdout.readline()


def on_hosts(min_nodes: int, ssh: list[str], **scripts: str) -> HostsPlan:
    commands = {name: [*ssh, name, script] for name, script in scripts.items()}
    return HostsPlan(commands, (), min_nodes)


def test_output_is_labeled_and_first_failure_named(
    ssh: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmp.launcher.hosts._NOTICE_SECONDS", 0.2)
    plan = on_hosts(2, ssh, a="echo out; echo err >&2; exit 3", b="read line; exit 4")
    assert run_on_hosts(plan) == 3
    out, err = capfd.readouterr()
    assert out == "[a] out\n"
    assert "[a] err\n" in err
    assert err.endswith("distmp launch: host a failed with exit code 3\n")


def test_unreachable_host_ends_others(
    ssh: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distmp.launcher.hosts._NOTICE_SECONDS", 0.2)
    # The agent reads the name of the signal.
    plan = on_hosts(2, ssh, unreachable="", b="read line; echo got $line; exit 143")
    assert run_on_hosts(plan) == 255
    out, err = capfd.readouterr()
    assert out == "[b] got SIGTERM\n"
    assert "host unreachable could not be reached by ssh" in err.splitlines()[-1]


def test_remaining_hosts_continue_above_minimum(
    ssh: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    plan = on_hosts(1, ssh, a="exit 3", b="sleep 0.5; echo done")
    assert run_on_hosts(plan) == 0
    assert capfd.readouterr().out == "[b] done\n"


def test_missing_ssh_is_one_message() -> None:
    with pytest.raises(ConfigError, match="--ssh"):
        run_on_hosts(on_hosts(1, ["/no/such/ssh"], a="true"))


@pytest.mark.parametrize(
    ("number", "code", "ending"),
    [
        (signal.SIGINT, 130, "stopped by SIGINT"),
        (signal.SIGTERM, 75, "stopped by SIGTERM"),
        pytest.param(signal.SIGTERM, 1, "host a failed with exit code 1", id="no checkpoint"),
    ],
)
def test_signal_reaches_every_host(
    number: signal.Signals, code: int, ending: str, ssh: list[str]
) -> None:
    # The second host ends later, so that the first one is reported.
    program = f"""
        import sys
        from distmp.launcher.hosts import HostsPlan, run_on_hosts
        obey = "echo ready; read line; echo got $line; sleep %d; exit {code}"
        hosts = {{name: {ssh!r} + [name, obey % (name == "b")] for name in "ab"}}
        sys.exit(run_on_hosts(HostsPlan(hosts, (), 2)))
    """
    with Running(program) as process:
        started = sorted(process.line() for _ in "ab")
        assert started == ["[a] ready\n", "[b] ready\n"]
        process.send_signal(signal.SIGHUP)  # the terminal closes
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == code
    assert sorted(out.splitlines()) == [f"[a] got {number.name}", f"[b] got {number.name}"]
    assert err == f"distmp launch: {ending}\n"


@pytest.mark.parametrize(("line", "code"), [("SIGUSR1\n", 40), (None, 41), ("NONSENSE\n", None)])
def test_agent_obeys_its_standard_input(line: str | None, code: int | None) -> None:
    program = """
        import signal, sys, time
        from distmp.launcher.hosts import follow_stdin
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(40))
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(41))
        follow_stdin()
        assert sys.stdin.read() == ""
        print("ready", flush=True)
        time.sleep(600)
    """
    with Running(program) as process:
        assert process.stdin is not None
        assert process.line() == "ready\n"
        if line is None:
            process.stdin.close()
        else:
            process.stdin.write(line)
            process.stdin.flush()
        if code is None:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1)
            process.kill()
        else:
            assert process.wait(100) == code


def test_agents_end_when_launcher_is_killed(tmp_path: Path, ssh: list[str]) -> None:
    ended = tmp_path / "ended"
    script = f"echo ready; while read line; do :; done; touch {ended}"
    program = f"""
        from distmp.launcher.hosts import HostsPlan, run_on_hosts
        run_on_hosts(HostsPlan({{"a": {[*ssh, "a", script]!r}}}, (), 1))
    """
    with Running(program) as process:
        process.line()
        process.kill()
    wait_until(ended.exists)


def test_two_interrupts_return_interrupt_exit_code(ssh: list[str]) -> None:
    program = f"""
        import sys
        from distmp.launcher.hosts import HostsPlan, run_on_hosts
        agent = "echo ready; read line; echo got; read line; exit 3"
        sys.exit(run_on_hosts(HostsPlan({{"a": {ssh!r} + ["a", agent]}}, (), 1)))
    """
    with Running(program) as process:
        for expected in ("ready", "got"):
            assert process.line() == f"[a] {expected}\n"
            process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert err == "distmp launch: stopped by SIGINT, without waiting for a checkpoint\n"


ROOT = Path(__file__).parent.parent.parent
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")


@contextlib.contextmanager
def ssh_servers(hosts: TwoHosts, directory: Path) -> Iterator[str]:
    """Start an ssh server with temporary keys on each host; yield the ssh command to reach them."""
    for name in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", directory / name], check=True
        )
    shutil.copy(directory / "user.pub", directory / "authorized")
    (directory / "known").write_text(f"{','.join(NAMES)} {(directory / 'host.pub').read_text()}")
    server = {
        "HostKey": directory / "host",
        "AuthorizedKeysFile": directory / "authorized",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
    }
    hosts.run(0, "mkdir", "/run/sshd")
    for host in range(2):
        options = [f"-o{name}={value}" for name, value in server.items()]
        hosts.run(host, str(SSHD), "-f", "/dev/null", *options)
    client = {"IdentityFile": directory / "user", "UserKnownHostsFile": directory / "known"}
    words = ["ssh", "-F", "none", *(f"-o{name}={value}" for name, value in client.items())]
    yield shlex.join(words)


@pytest.mark.nightly
def test_two_hosts_train_two_steps(tmp_path: Path) -> None:
    if SSHD is None:
        pytest.skip("sshd is not installed (apt-get install openssh-server)")
    reason = two_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    options = [*TINY, f"--data.path={corpus(tmp_path / 'corpus')}", "--steps=2"]
    options += ["--schedule.warmup-steps=1", "--validation.every=0", "--run-dir=run of two"]
    with two_hosts.two_hosts() as hosts, ssh_servers(hosts, tmp_path) as ssh:
        output = hosts.run(
            0,
            *python("-m", "distmp", "launch", "--hosts", ",".join(NAMES), "--ssh", ssh),
            *("--", "--config", str(ROOT / "configs" / "quickstart.yaml"), *options),
            cwd=tmp_path,
            env={**environment(), "PET_NPROC_PER_NODE": "1"},
            timeout=150,
        )
    assert "[node1] ranks: 2 on cpu" in output
    assert "[node2] distmp launch: " in output
    assert (tmp_path / "run of two" / "steps.jsonl").read_text().count("\n") == 2
