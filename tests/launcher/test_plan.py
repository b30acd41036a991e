from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from distmp.errors import ConfigError
from distmp.launcher.job import ExplainedValue, Job, detect
from distmp.launcher.network import AddressError, Network
from distmp.launcher.plan import Plan, UserOptions, assignment, make_plan, port_of, split_endpoint
from tests.launcher.networks import INTERFACES, NAMES, network
from tests.launcher.test_job import POD, SRUN

LOCAL = Job("local", "nothing")
# Machine 1 of two; the first is n1, and this machine is 10.0.0.2 on eth1.
SECOND = Job(
    "slurm",
    "SLURM_JOB_ID=7",
    nodes=ExplainedValue(2, "nodes"),
    node_rank=ExplainedValue(1, "SLURM_NODEID"),
    head=ExplainedValue("n1", "list"),
    name=ExplainedValue("7.0", "job"),
    hosts=("n1", "n2"),
)
FIRST = replace(
    SECOND, node_rank=ExplainedValue(0, "SLURM_NODEID"), head=ExplainedValue("n2", "list")
)


def plan(
    job: Job = LOCAL,
    given: UserOptions = UserOptions(),  # noqa: B008  # frozen
    machines: Network | None = None,
    variables: dict[str, str] | None = None,
) -> Plan:
    ranks = ExplainedValue(given.ranks or 4, "GPUs")
    return make_plan(given, job, machines or network(), 16, ranks, variables or {})


def variables_of(planned: Plan) -> dict[str, str]:
    return {name: variable.value for name, variable in planned.variables.items()}


PORT = port_of("7.0").value


def test_one_machine_needs_no_rendezvous() -> None:
    planned = plan()
    assert planned.torchrun() == [*("--nproc-per-node=4", "--standalone", "--local-addr=127.0.0.1")]
    assert planned.endpoint is None
    assert variables_of(planned) == {
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "=lo",
    }


def test_one_machine_keeps_user_settings() -> None:
    given = UserOptions(("--local-addr=10.0.0.2",), local_addr="10.0.0.2")
    variables = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "eth1", "OMP_NUM_THREADS": "1"}
    planned = plan(LOCAL, given, variables=variables)
    assert planned.torchrun() == ["--nproc-per-node=4", "--standalone", "--local-addr=10.0.0.2"]
    assert variables_of(planned) == {}


def test_one_machine_without_loopback_interface() -> None:
    planned = plan(machines=network(interfaces={"eth0": ("192.168.7.9",)}))
    assert planned.torchrun() == ["--nproc-per-node=4", "--standalone"]


def test_second_machine_connects_to_first() -> None:
    planned = plan(SECOND)
    assert planned.torchrun() == [
        *("--nproc-per-node=4", "--nnodes=2", "--rdzv-backend=c10d"),
        *(f"--rdzv-endpoint=10.0.0.1:{PORT}", "--rdzv-id=7.0"),
        *("--local-addr=10.0.0.2", "--rdzv-conf=is_host=false,read_timeout=115"),
    ]
    assert variables_of(planned) == {
        "OMP_NUM_THREADS": "4",
        "GLOO_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }
    assert planned.endpoint is not None
    assert not planned.endpoint.is_host


def test_first_machine_is_identified_by_address() -> None:
    machines = network(names={**NAMES, "n2": "10.0.0.2"}, hostname="another-name")
    planned = plan(FIRST, machines=machines)
    assert f"--rdzv-endpoint=10.0.0.2:{PORT}" in planned.torchrun()
    assert "--rdzv-conf=is_host=true,read_timeout=115" in planned.torchrun()


def test_plans_of_both_machines_agree() -> None:
    """Only `is_host`, the address and the interface may differ between machines."""
    first = plan(
        replace(SECOND, node_rank=ExplainedValue(0, "SLURM_NODEID")),
        machines=network(interfaces={"lo": ("127.0.0.1",), "ib0": ("10.0.0.1",)}),
    )
    own = ("--local-addr", "--rdzv-conf")
    shared = [word for word in first.torchrun() if not word.startswith(own)]
    assert shared == [word for word in plan(SECOND).torchrun() if not word.startswith(own)]
    assert variables_of(first)["GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    ("options", "absent", "present"),
    [
        ({"nnodes": (1, 4), "arguments": ("--nnodes=1:4",)}, "--nnodes=2", "--nnodes=1:4"),
        (
            {"ranks": 2, "arguments": ("--nproc-per-node=2",)},
            "--nproc-per-node=4",
            "--nproc-per-node=2",
        ),
        ({"rdzv_id": "x", "arguments": ("--rdzv-id=x",)}, "--rdzv-id=7.0", "--rdzv-id=x"),
        (
            {"rdzv_endpoint": "n3:99", "arguments": ("--rdzv-endpoint=n3:99",)},
            f"--rdzv-endpoint=10.0.0.1:{PORT}",
            "--rdzv-endpoint=n3:99",
        ),
        (
            {"local_addr": "192.168.7.9", "arguments": ("--local-addr=192.168.7.9",)},
            "--local-addr=10.0.0.2",
            "--local-addr=192.168.7.9",
        ),
        (
            {"rdzv_conf": {"join_timeout": "9"}, "arguments": ("--rdzv-conf=join_timeout=9",)},
            "--rdzv-conf=is_host=false,read_timeout=115",
            "--rdzv-conf=is_host=false,read_timeout=115,join_timeout=9",
        ),
        (
            {"rdzv_conf": {"is_host": "1"}, "arguments": ("--rdzv-conf=is_host=1",)},
            "--rdzv-conf=is_host=false,read_timeout=115",
            "--rdzv-conf=is_host=1,read_timeout=115",
        ),
        ({"port": 4321}, f"--rdzv-endpoint=10.0.0.1:{PORT}", "--rdzv-endpoint=10.0.0.1:4321"),
    ],
)
def test_user_options_take_precedence(
    options: dict[str, object], absent: str, present: str
) -> None:
    words = plan(SECOND, UserOptions(**options)).torchrun()  # type: ignore[arg-type]
    assert absent not in words
    assert present in words
    # torchrun uses the last of several.
    assert [word for word in words if word.startswith(present.partition("=")[0])][-1] == present


def test_user_options_apply_to_endpoint() -> None:
    conf = {"join_timeout": "9", "is_host": "yes"}
    given = UserOptions(rdzv_endpoint="n3:99", rdzv_id="x", nnodes=(1, 4), rdzv_conf=conf)
    endpoint = plan(SECOND, given).endpoint
    assert endpoint is not None
    assert (str(endpoint), endpoint.run_id, endpoint.is_host) == ("10.0.0.3:99", "x", True)
    assert (endpoint.min_nodes, endpoint.join_timeout_seconds) == (1, 9)


def test_other_rendezvous_backend_is_unchanged() -> None:
    given = UserOptions(arguments=("--master-addr=a",), own_rendezvous="master_addr", nnodes=(2, 2))
    assert plan(LOCAL, given).torchrun() == ["--nproc-per-node=4", "--master-addr=a"]


def test_variables_set_by_user_are_kept() -> None:
    planned = plan(SECOND, variables={"GLOO_SOCKET_IFNAME": "eth0,eth1", "OMP_NUM_THREADS": "1"})
    assert variables_of(planned) == {"NCCL_SOCKET_IFNAME": "=eth1"}


@pytest.mark.parametrize(
    ("interface", "problem"), [("eth7", "no such interface"), ("lo", "cannot be reached")]
)
def test_unknown_interface_is_named(interface: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        plan(SECOND, variables={"GLOO_SOCKET_IFNAME": interface})
    assert "eth1 (10.0.0.2)" in str(error.value)


def test_unknown_interface_on_one_machine_is_named() -> None:
    """It would be a traceback of each rank."""
    with pytest.raises(ConfigError, match="no such interface"):
        plan(LOCAL, variables={"GLOO_SOCKET_IFNAME": "eth7"})


def test_head_without_address_is_refused() -> None:
    with pytest.raises(AddressError, match="'n9' has no address here") as error:
        plan(replace(SECOND, head=ExplainedValue("n9", "list")))
    assert "--rdzv-endpoint" in str(error.value)


def test_head_resolving_to_loopback_is_refused() -> None:
    """Debian maps a machine's own name to 127.0.1.1; a copied /etc/hosts misleads the others."""
    with pytest.raises(AddressError, match=r"'n1' \(list\) is 127\.0\.1\.1 here"):
        plan(SECOND, machines=network(names={"n1": "127.0.1.1", "n2": "10.0.0.2"}))


def test_head_may_resolve_itself_to_loopback() -> None:
    """Then the route to another machine decides, not the default route."""
    planned = plan(FIRST, machines=network(names={"n2": "127.0.1.1", "n1": "10.0.0.1"}))
    endpoint = planned.endpoint
    assert endpoint is not None
    assert (endpoint.address, endpoint.is_host) == ("10.0.0.2", True)


def test_loopback_head_without_hosts_needs_single_address() -> None:
    names = {"n2": "127.0.1.1"}
    alone = network(names, {"lo": ("127.0.0.1", "fe80::1"), "e": ("fe80::2", "10.0.0.2")})
    endpoint = plan(replace(FIRST, hosts=()), machines=alone).endpoint
    assert endpoint is not None
    assert endpoint.address == "10.0.0.2"
    for interfaces in (INTERFACES, {"lo": ("127.0.0.1",)}):
        with pytest.raises(AddressError, match=r"a loopback address, and this machine has several"):
            plan(replace(FIRST, hosts=()), machines=network(names, interfaces))
        one = UserOptions(nnodes=(1, 1), rdzv_endpoint="n2:4321")
        endpoint = plan(LOCAL, one, network(names, interfaces)).endpoint
        assert endpoint is not None
        assert (endpoint.address, endpoint.is_host) == ("127.0.1.1", True)


def test_node_rank_selects_host_on_shared_machine() -> None:
    """With two slurmd on one machine, the node rank, not the address, selects the host."""
    names = {"n1": "127.0.0.1", "n2": "127.0.0.1"}
    endpoints = [plan(job, machines=network(names=names)).endpoint for job in (FIRST, SECOND)]
    assert [endpoint and endpoint.is_host for endpoint in endpoints] == [True, False]
    assert {endpoint and endpoint.local_address for endpoint in endpoints} == {"127.0.0.1"}


def test_first_machine_with_other_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="this is the first machine") as error:
        plan(replace(FIRST, head=ExplainedValue("n1", "list")))
    assert "eth1 (10.0.0.2)" in str(error.value)


def test_missing_route_to_head_is_refused() -> None:
    alone = network(interfaces={"lo": ("127.0.0.1",)})
    with pytest.raises(AddressError, match=r"no route leads to 10\.0\.0\.1"):
        plan(SECOND, machines=alone)


def test_own_address_on_interface_that_is_down_is_refused() -> None:
    down = replace(network(interfaces={"lo": ("127.0.0.1",)}), source=lambda address: address)
    with pytest.raises(AddressError, match=r"the interface of 10\.0\.0\.2, .* is down"):
        plan(LOCAL, UserOptions(nnodes=(2, 2), rdzv_endpoint="10.0.0.2"), machines=down)


def test_local_address_of_other_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="no such address"):
        plan(SECOND, UserOptions(local_addr="10.0.0.77"))


def test_manual_launch_uses_given_endpoint() -> None:
    given = UserOptions(nnodes=(2, 2), rdzv_endpoint="10.0.0.2")
    endpoint = plan(LOCAL, given).endpoint
    assert endpoint is not None
    assert (str(endpoint), endpoint.is_host) == ("10.0.0.2:29400", True)
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        plan(LOCAL, UserOptions(nnodes=(2, 2)))
    with pytest.raises(ConfigError, match="--port"):
        plan(LOCAL, replace(given, port=3))


@pytest.mark.parametrize("nnodes", [None, (1, 1)])
@pytest.mark.parametrize("backend", [None, "c10d"])
@pytest.mark.parametrize("head", ["127.0.0.1", "localhost", "10.0.0.2", "n2"])
def test_single_machine_opens_given_endpoint(
    nnodes: tuple[int, int] | None, backend: str | None, head: str
) -> None:
    given = UserOptions(nnodes=nnodes, rdzv_endpoint=f"{head}:4321", rdzv_backend=backend)
    endpoint = plan(LOCAL, given).endpoint
    assert endpoint is not None
    assert (endpoint.port, endpoint.is_host, endpoint.min_nodes) == (4321, True, 1)


@pytest.mark.parametrize("own", [None, "standalone", "master_addr"])
def test_port_without_effect_is_refused(own: str | None) -> None:
    with pytest.raises(ConfigError, match=r"--port = 3: has no effect; "):
        plan(LOCAL, UserOptions(port=3, own_rendezvous=own))


def test_single_machine_accepts_port_0() -> None:
    given = UserOptions(arguments=("--rdzv-endpoint=localhost:0",), rdzv_endpoint="localhost:0")
    planned = plan(LOCAL, given)
    assert planned.endpoint is None
    assert planned.torchrun() == [
        *("--nproc-per-node=4", "--local-addr=127.0.0.1", "--rdzv-endpoint=localhost:0")
    ]


@pytest.mark.parametrize("nnodes", [None, (1, 1)])
def test_single_machine_with_remote_endpoint_is_refused(nnodes: tuple[int, int] | None) -> None:
    given = UserOptions(nnodes=nnodes, rdzv_endpoint="n1:4321")
    with pytest.raises(ConfigError, match="one machine, and this is not n1") as error:
        plan(LOCAL, given)
    assert "--nnodes" in str(error.value)
    assert "eth1 (10.0.0.2)" in str(error.value)


def test_ipv6_endpoint_is_formatted() -> None:
    interfaces = {"lo": ("::1",), "eth0": ("fd00::1:2",)}
    given = UserOptions(nnodes=(2, 2), rdzv_endpoint="[fd00:0::1:2]:5000")
    planned = plan(LOCAL, given, network(interfaces=interfaces))
    assert planned.endpoint is not None
    assert planned.endpoint.is_host
    assert variables_of(planned)["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    ("variables", "hostname", "endpoint"),
    [
        pytest.param(SRUN, "n09", "10.1.0.8", id="slurm"),
        pytest.param(POD, "train-1.workers", "10.1.0.8", id="kubernetes"),
    ],
)
def test_recorded_variables_give_endpoint(
    variables: dict[str, str], hostname: str, endpoint: str
) -> None:
    names = {"n08": "10.1.0.8", "n09": "10.0.0.2", "train-0.workers": "10.1.0.8"}
    given = UserOptions(nnodes=(2, 2)) if variables is POD else UserOptions()
    planned = plan(detect(variables, hostname), given, network(names=names))
    assert planned.endpoint is not None
    assert planned.endpoint.address == endpoint
    assert planned.endpoint.port == port_of(planned.endpoint.run_id).value
    assert planned.endpoint.node_rank == 1


def test_kubernetes_needs_number_of_pods() -> None:
    with pytest.raises(ConfigError, match="--nnodes"):
        plan(detect(POD, "train-1"))


def test_ports_are_spread_in_safe_range() -> None:
    ports = {port_of(f"{job}.0").value for job in range(1000)}
    assert min(ports) >= 20000
    assert max(ports) < 30000
    assert len(ports) > 900


@pytest.mark.parametrize(
    ("text", "expected"),
    [("h", ("h", None)), ("h:1", ("h", 1)), ("[::1]:2", ("::1", 2)), ("[::1]", ("::1", None))],
)
def test_endpoint_text_is_split(text: str, expected: tuple[str, int | None]) -> None:
    assert split_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:x", "h:70000", "a:b:1", "h:0"])
def test_invalid_endpoints_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        split_endpoint(text)


def test_description_has_reasons_and_command() -> None:
    planned = plan(replace(SECOND, notes=("selected slurm",)))
    *comments, command = planned.describe(["-m", "distmp.train", "a b"]).splitlines()
    assert all(line.startswith("#") for line in comments)
    assert "# note: selected slurm" in comments
    assert comments[-1].startswith("# other machines have the same, with their")
    for value, entry in [
        *((option.value, option) for option in planned.options),
        *((assignment(name, entry.value), entry) for name, entry in planned.variables.items()),
    ]:
        (line,) = (line for line in comments if line.startswith(f"#   {value} "))
        assert line.endswith(entry.reason)
    words = shlex.split(command)
    assert words[:3] == [f"{name}={c.value}" for name, c in planned.variables.items()]
    assert words[3:] == ["torchrun", *planned.torchrun(), "-m", "distmp.train", "a b"]
