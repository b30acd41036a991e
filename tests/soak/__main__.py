"""Disturbs runs at random from a seed, until the time is up.

    python -m tests.soak --seconds 240 --seed 7 --hosts 2
    python -m tests.soak --seconds 600 --only kill --events 20

A run on several hosts is killed (ranks, launchers, whole hosts), cut off, paused and restarted. A
launcher that has ended is started again, as a scheduler does. Each run has to end with all of its
steps and the weights of an undisturbed run, and a further step must not take too long.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

from distmp.distributed.limits import ARRIVAL_SECONDS, REJOIN_SECONDS
from tests import two_hosts
from tests.launcher.two_hosts import NAMES
from tests.soak.cluster import Cluster, check_result, cluster, undisturbed

STEPS = 1500
SETTINGS = [f"--steps={STEPS}", "--resume=auto"]
OPTIONS = ["--max-restarts=100"]
# Longest time without a further step. It contains a connection that is cut, and a start, which
# takes long on a busy machine.
STUCK_SECONDS = REJOIN_SECONDS + ARRIVAL_SECONDS + 120
# A launcher that is started again after the others have ended joins nobody, so the end of a run is
# left alone. More steps than a rank takes until it notices that its launcher has ended.
LAST_STEPS = 100
# How often the hosts are looked at.
POLL_SECONDS = 0.2
_QDISC = ("dev", "eth0", "root")
EVENTS = {
    "kill rank": 4,
    "kill launcher": 2,
    "kill host": 2,
    "cut": 3,
    "pause": 2,
    "stop": 1,
    "delay": 1,
}


class Disturbed:
    """A run whose hosts are disturbed by a random generator.

    Args:
        run: The run, started.
        chance: Chooses events, hosts and times.
        events: The possible events, and how often they happen relative to each other.

    Attributes:
        count: Number of events up to now.
    """

    def __init__(self, run: Cluster, chance: random.Random, events: dict[str, int]) -> None:
        self.count = 0
        self._run = run
        self._chance = chance
        self._events = events
        # What has to be undone, and when.
        self._pending: list[tuple[float, str, int]] = []
        self._next_event = time.monotonic() + chance.uniform(1, 4)
        self._restart_at: dict[int, float] = {}
        self._advanced = time.monotonic()
        # The last step that has a record, and the number of hosts that are done.
        self._state = (0, 0)
        self._done: set[int] = set()

    def until_finished(self, until: float, least: int) -> None:
        """Wait until the run has finished, and disturb it.

        Args:
            until: When to stop disturbing it, on the monotonic clock.
            least: Number of events that have to happen before.
        """
        while len(self._done) < self._run.count:
            now = time.monotonic()
            self._undo(now)
            self._start_again(now)
            is_calm = self._pending or self._state[0] > STEPS - LAST_STEPS
            if self._next_event < now and (now < until or self.count < least) and not is_calm:
                self._disturb(now)
            self._check_progress(now)
            time.sleep(POLL_SECONDS)
        self._undo(float("inf"))

    def _disturb(self, now: float) -> None:
        self.count += 1
        names, weights = zip(*self._events.items(), strict=True)
        (event,) = self._chance.choices(names, weights)
        host = self._chance.randrange(self._run.count)
        seconds = self._chance.choice([1, 3, 8, 20, 45])
        say(f"step {self._run.step()}: {event} on {NAMES[host]}, {seconds} s")
        with contextlib.suppress(psutil.NoSuchProcess):
            if event.startswith("kill"):
                self._run.kill(host, event.split()[1])
            elif event == "stop":
                self._run.process(host, "launcher").send_signal(signal.SIGTERM)
            else:
                {"cut": self._run.cut, "pause": self._pause, "delay": self._delay}[event](host)
                self._pending.append((now + seconds, event, host))
        self._next_event = now + seconds + self._chance.uniform(1, 10)

    def _pause(self, host: int) -> None:
        self._run.process(host, "rank").suspend()

    def _delay(self, host: int) -> None:
        self._run.on_host(host, "tc", "qdisc", "add", *_QDISC, "netem", "delay", "80ms", "20ms")

    def _undo(self, now: float) -> None:
        for entry in [entry for entry in self._pending if entry[0] <= now]:
            self._pending.remove(entry)
            _, event, host = entry
            if event == "cut":
                self._run.reconnect(host)
            elif event == "delay":
                self._run.on_host(host, "tc", "qdisc", "del", *_QDISC)
            else:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._run.process(host, "rank").resume()

    def _start_again(self, now: float) -> None:
        """Start launchers that have ended before the run had finished."""
        for host, agent in enumerate(self._run.agents):
            code = agent.process.poll()
            if code is None or host in self._done:
                continue
            if code == 0:
                self._done.add(host)
            elif host not in self._restart_at:
                say(f"the launcher of {NAMES[host]} has ended with {code}")
                self._restart_at[host] = now + self._chance.uniform(0, 3)
            elif now > self._restart_at[host]:
                del self._restart_at[host]
                self._run.restart(host)

    def _check_progress(self, now: float) -> None:
        state = (self._run.step(), len(self._done))
        if state != self._state:
            self._state, self._advanced = state, now
        assert now - self._advanced < STUCK_SECONDS, (
            f"no progress for {STUCK_SECONDS:.0f} s after step {state[0]}"
        )


def say(text: str) -> None:
    sys.stdout.write(f"soak: {text}\n")
    sys.stdout.flush()


def soak(directory: Path, options: argparse.Namespace, seed: int) -> tuple[int, int]:
    """Disturb runs one after the other until the time is up, and enough has happened.

    Returns:
        The number of runs, and the number of events.
    """
    chance = random.Random(seed)
    events = {name: weight for name, weight in EVENTS.items() if name.startswith(options.only)}
    if "delay" in events and not has_netem():
        del events["delay"]
        say("this kernel has no netem: packets are not delayed")
    expected = undisturbed(directory / "undisturbed", options.hosts, SETTINGS)
    until = time.monotonic() + options.seconds
    runs = happened = 0
    while happened < options.events or time.monotonic() < until - 30:
        runs += 1
        say(f"run {runs} on {options.hosts} hosts")
        with cluster(options.hosts, directory / f"run {runs}", OPTIONS, SETTINGS) as run:
            run.start()
            least = options.events - happened
            happened += disturbed(run, chance, events, until, least, expected)
        shutil.rmtree(directory / f"run {runs}")
    return runs, happened


def disturbed(
    run: Cluster,
    chance: random.Random,
    events: dict[str, int],
    until: float,
    least: int,
    expected: dict[str, torch.Tensor],
) -> int:
    """Disturb a run until it has finished, and check it; return the number of events."""
    disturbed = Disturbed(run, chance, events)
    try:
        disturbed.until_finished(until, least)
        check_result(run, expected, STEPS)
    except AssertionError:
        say(f"what the hosts printed:\n{run.report()}")
        raise
    return disturbed.count


def has_netem() -> bool:
    """Return whether the kernel can delay packets in a namespace."""
    command = "ip link set lo up && tc qdisc add dev lo root netem delay 1ms"
    words = ["unshare", "--net", "sh", "-c", command]
    return subprocess.run(words, capture_output=True).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--seed", type=int, default=None, help="default: from the clock")
    parser.add_argument("--hosts", type=int, default=2, choices=(2, 3))
    parser.add_argument("--only", default="", help="events whose names begin with this")
    parser.add_argument("--events", type=int, default=1, help="least number of events")
    options = parser.parse_args()
    if (reason := two_hosts.why_not()) is not None:
        say(f"skipped: {reason}")
        return 0
    seed = int(time.time()) if options.seed is None else options.seed
    say(f"--hosts {options.hosts} --seed {seed} --seconds {options.seconds:g}")
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        runs, events = soak(Path(directory), options, seed)
    say(f"{runs} runs, {events} events: all steps, and the weights of an undisturbed run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
