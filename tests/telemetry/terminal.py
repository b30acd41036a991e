"""Run a function on a pseudo-terminal, and emulate enough of a screen to check its content."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import traceback
from collections.abc import Callable
from typing import NoReturn

_TOKEN = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def run_on_terminal(
    program: Callable[[], None], columns: int, environment: dict[str, str] | None = None
) -> str:
    """Run `program` in a child whose three standard streams are a terminal `columns` wide.

    Returns:
        The output to the terminal.
    """
    child, terminal = pty.fork()
    if child == 0:
        _run(program, columns, environment or {})
    output = b"".join(iter(lambda: _read(terminal), b""))
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert status == 0, output.decode()
    return output.decode()


def _run(program: Callable[[], None], columns: int, environment: dict[str, str]) -> NoReturn:
    status = 1
    try:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        for name in ("COLUMNS", "NO_COLOR"):
            os.environ.pop(name, None)
        os.environ.update({"TERM": "xterm-256color", **environment})
        with open(1, "w", closefd=False) as sys.stdout, open(2, "w", closefd=False) as sys.stderr:
            program()
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
        raise
    finally:
        # Otherwise the child would continue with the rest of the tests.
        os._exit(status)


def screen(output: str, columns: int) -> list[str]:
    """Return the lines on the screen after `output`; a line break is sent as CR and LF."""
    lines, row, column = [""], 0, 0
    for match in _TOKEN.finditer(output):
        parameter, command, carriage_return, line_feed, text = match.groups()
        if carriage_return:
            column = 0
        elif line_feed:
            row += 1
        elif text:
            # Lines must not wrap, so that lines and rows are the same.
            assert column + len(text) <= columns, text
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        elif command == "A":
            row -= int(parameter or 1)
        elif command == "K":
            lines[row] = "" if parameter == "2" else lines[row][:column]
        else:
            assert command in "hlm", f"unknown command {match.group()!r}"
        lines += [""] * (row + 1 - len(lines))
    return lines


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the end of a pseudo-terminal as an input/output error.
        return b""
