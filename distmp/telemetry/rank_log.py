"""Copy all output of a rank to a file, including output of C++ libraries.

Standard output and standard error become pipes into `tee`, a separate process that drains them to
the last byte even if the rank is killed. torchrun's `--tee` does not fit: it does not write to the
run's directory, and is missing under other launchers.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from distmp.telemetry.console import flush_standard_streams

logger = logging.getLogger("distmp")

# It ignores signals that end a job, so that the last output of ranks is copied, and the one of a
# closed reader, so that the file is still written.
_TEE = ("sh", "-c", "trap '' PIPE HUP INT TERM USR1 USR2; exec tee -a \"$0\"")

# A child process of the rank may keep the pipe open; `tee` then exits together with it.
_END_SECONDS = 2.0

_STREAMS = (1, 2)


class RankLog:
    """Copies this process's output to a file, from `start` to the end of a `with` block.

    Output before the path of the file is known is buffered and copied first.
    """

    def __init__(self) -> None:
        self._streams: dict[int, int] = {}  # stream: its original descriptor
        self._tees: list[subprocess.Popen[bytes]] = []
        self._early: IO[bytes] | None = None

    def start(self, header: str) -> None:
        """Start copying.

        Args:
            header: First line of this start of the rank in the file.
        """
        self._streams = {stream: os.dup(stream) for stream in _STREAMS}
        self._early = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        # Several processes write to it, so every write must append.
        fcntl.fcntl(self._early, fcntl.F_SETFL, os.O_APPEND)
        self._early.write(f"{header}\n".encode(errors="backslashreplace"))
        # The temporary file is already unlinked, so it is deleted when the process ends; its
        # descriptor still gives access to it.
        self._redirect(f"/proc/self/fd/{self._early.fileno()}", self._early.fileno())

    def place(self, path: Path) -> None:
        """Set the path of the file; a restarted rank appends to it.

        A file that cannot be written is a warning, not an error.
        """
        early, self._early = self._early, None
        if early is None:
            return
        self._restore()
        try:
            with early:
                path.parent.mkdir(parents=True, exist_ok=True)
                early.seek(0)
                with path.open("ab") as file:
                    file.write(early.read())
        except OSError as error:
            logger.warning("no log of this rank: %s cannot be written (%s)", path, error.strerror)
            return
        self._redirect(str(path))

    def _redirect(self, path: str, *descriptors: int) -> None:
        flush_standard_streams()
        for stream, before in self._streams.items():
            tee = subprocess.Popen(
                [*_TEE, path],
                stdin=subprocess.PIPE,
                stdout=before,
                stderr=subprocess.DEVNULL,
                pass_fds=descriptors,
                start_new_session=True,  # a terminal sends signals to process groups
            )
            assert tee.stdin is not None
            with tee.stdin as pipe:
                os.dup2(pipe.fileno(), stream)
            self._tees.append(tee)
        # Python buffers output to pipes, and a killed process would lose it.
        for text in (sys.stdout, sys.stderr):
            if isinstance(text, io.TextIOWrapper):
                text.reconfigure(line_buffering=True)

    def _restore(self) -> None:
        """Restore the original descriptors of the streams."""
        flush_standard_streams()
        for stream, before in self._streams.items():
            os.dup2(before, stream)
        for tee in self._tees:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(_END_SECONDS)
        self._tees.clear()

    def __enter__(self) -> RankLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._restore()
        if self._early is not None:
            self._early.close()
        for before in self._streams.values():
            os.close(before)
        self._streams.clear()
