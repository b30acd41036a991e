from __future__ import annotations

import subprocess
import sys


def test_importing_is_cheap() -> None:
    script = """
import sys
import torch
before = set(sys.modules)
import distmp.telemetry
heavy = {"rich", "matplotlib", "transformers", "accelerate"} & (set(sys.modules) - before)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
