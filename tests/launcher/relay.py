"""A network between two hosts that delays, loses or drops packets, without kernel modules.

python -m tests.launcher.relay [--delay S] [--loss SHARE] [--largest BYTES] INTERFACE INTERFACE
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import select
import socket
import subprocess
import sys
import time

from tests import two_hosts

# From linux/if_packet.h: frames keep their offloads (checksum, segmentation) in a header.
_SOL_PACKET, _PACKET_VNET_HDR = 263, 15
_ALL_PROTOCOLS = 3
_PACKET_OUTGOING = 4
_FRAME_BYTES = 1 << 17

# In the namespaces of the first host: a third network, to which the link of both hosts is moved.
_RELAY = """\
set -e
python=$1 second=$2
shift 2
ip link del eth0
unshare --net sleep infinity &
relay=$!
while [ /proc/$relay/ns/net -ef /proc/self/ns/net ]; do sleep 0.01; done
ip link add eth0 type veth peer name to1 netns $relay
ip address add 10.99.7.1/24 dev eth0
ip link set eth0 up
nsenter --target $second --net ip link add eth0 type veth peer name to2 netns $relay
nsenter --target $second --net ip address add 10.99.7.2/24 dev eth0
nsenter --target $second --net ip link set eth0 up
nsenter --target $relay --net ip link set to1 up
nsenter --target $relay --net ip link set to2 up
exec nsenter --target $relay --net "$python" -m tests.launcher.relay "$@" to1 to2
"""


def relay_link(hosts: two_hosts.TwoHosts, *options: str) -> subprocess.Popen[str]:
    """Replace the link of two hosts by one through a relay; return its process.

    Args:
        hosts: The hosts; the relay ends with them.
        *options: Options of the relay.
    """
    words = ("bash", "-c", _RELAY, "relay", sys.executable, str(hosts.second), *options)
    process = subprocess.Popen(hosts.command(0, words), text=True)
    # The first host responds through the relay, even if nothing listens.
    probe = "import socket as s; exit(s.socket().connect_ex(('10.99.7.1', 1)) not in (0, 111))"
    while subprocess.run(hosts.command(1, (sys.executable, "-c", probe))).returncode:
        assert process.poll() is None, "the relay has ended"
        time.sleep(0.1)
    return process


def main() -> None:
    """Pass frames between two interfaces until the process is killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--largest", type=int, default=_FRAME_BYTES)
    parser.add_argument("interfaces", nargs=2)
    options = parser.parse_args()
    first, second = map(_open, options.interfaces)
    other = {first: second, second: first}
    chance, order = random.Random(1), itertools.count()
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    while True:
        patience = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for source in select.select([*other], [], [], patience)[0]:
            frame, (_, _, kind, *_) = source.recvfrom(_FRAME_BYTES)
            if kind == _PACKET_OUTGOING or len(frame) > options.largest:
                continue
            if chance.random() >= options.loss:
                due = time.monotonic() + options.delay
                heapq.heappush(waiting, (due, next(order), other[source], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, target, frame = heapq.heappop(waiting)
            target.send(frame)


def _open(interface: str) -> socket.socket:
    packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    packets.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    packets.bind((interface, 0))
    return packets


if __name__ == "__main__":
    main()
