"""A file for everything that a rank writes, beside the terminal: also what libraries write in C++.

Standard output and standard error of the process become pipes into `tee`, a program of its own: it
empties them to the last byte when the rank is killed. torchrun's `--tee` does not fit: it writes
elsewhere than in the run's folder, takes the terminal away from the live line, and is missing when
somebody else starts the ranks.
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
from types import TracebackType
from typing import IO, TextIO

logger = logging.getLogger("distmp")

# Signals that end a whole job have to leave it alone, so that the last words of ranks come through.
_TEE = ("sh", "-c", "trap '' HUP INT TERM USR1 USR2; exec tee -a \"$0\"")

# A process that the rank has started may hold the pipe open; `tee` ends with it then.
_END_SECONDS = 2.0

_STREAMS = (1, 2)


class RankLog:
    """Copies what this process writes into a file, from `start` to the end of a `with` block.

    What is written before the file's place is known is kept and comes first.

    Attributes:
        terminal: The terminal that standard output was, for what is drawn there and is not to be
            copied; None if it was none.
        shows_errors: Whether standard error was a terminal.
    """

    def __init__(self) -> None:
        self.terminal: TextIO | None = None
        self.shows_errors = False
        self._streams: dict[int, int] = {}  # where they led before
        self._tees: list[subprocess.Popen[bytes]] = []
        self._early: IO[bytes] | None = None
        self._file: IO[bytes] | None = None

    def start(self, header: str) -> None:
        """Begin to copy.

        Args:
            header: First line of this start of the rank in the file.
        """
        self._streams = {stream: os.dup(stream) for stream in _STREAMS}
        if os.isatty(self._streams[1]):
            self.terminal = open(os.dup(self._streams[1]), "w", buffering=1)  # noqa: SIM115
        self.shows_errors = os.isatty(self._streams[2])
        self._early = self._file = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115
        # Others write to it as well, and nobody must write over them.
        fcntl.fcntl(self._early, fcntl.F_SETFL, os.O_APPEND)
        self.write(f"{header}\n")
        # Deleted already, so that nothing is left however the process ends; its descriptor is a way
        # to it all the same.
        self._redirect(f"/proc/self/fd/{self._early.fileno()}", self._early.fileno())

    def write(self, text: str) -> None:
        """Write to the file alone, or nowhere if it cannot be written any more."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk is no reason to end a run
                self._file.write(text.encode(errors="backslashreplace"))

    def place(self, path: Path) -> None:
        """Say which file it is; a rank that starts again goes on at its end.

        A file that cannot be written costs a warning, not the run.
        """
        if self._early is None:
            return
        self._restore()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("ab", buffering=0)
            self._early.seek(0)
            file.write(self._early.read())
        except OSError as error:
            self._close_files()
            logger.warning("no log of this rank: %s cannot be written (%s)", path, error.strerror)
            return
        self._close_files()
        self._file = file
        self._redirect(str(path))

    def _redirect(self, path: str, *descriptors: int) -> None:
        _flush()
        for stream, before in self._streams.items():
            try:
                tee = subprocess.Popen(
                    [*_TEE, path],
                    stdin=subprocess.PIPE,
                    stdout=before,
                    stderr=subprocess.DEVNULL,
                    pass_fds=descriptors,
                    start_new_session=True,  # a terminal's signals go to groups
                )
            except OSError as error:
                logger.warning("no log of this rank: sh cannot be started (%s)", error.strerror)
                return
            assert tee.stdin is not None
            with tee.stdin as pipe:
                os.dup2(pipe.fileno(), stream)
            self._tees.append(tee)
        # Python buffers what goes to a pipe, and a killed process would take it along.
        for text in (sys.stdout, sys.stderr):
            if isinstance(text, io.TextIOWrapper):
                text.reconfigure(line_buffering=True)

    def _restore(self) -> None:
        """Let the streams lead where they did before."""
        _flush()
        for stream, before in self._streams.items():
            os.dup2(before, stream)
        for tee in self._tees:
            with contextlib.suppress(subprocess.TimeoutExpired):
                tee.wait(_END_SECONDS)
        self._tees.clear()

    def _close_files(self) -> None:
        for file in (self._early, self._file):
            if file is not None:
                file.close()
        self._early = self._file = None

    def __enter__(self) -> RankLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        self._close_files()
        if self.terminal is not None:
            self.terminal.close()
            self.terminal = None
        for before in self._streams.values():
            os.close(before)
        self._streams.clear()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it any more
            stream.flush()
