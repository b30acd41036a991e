"""Deprecated import paths: documented paths of the previous release work, with a warning.

`import distmp.accelerate` imports `distmp.integrations.accelerate`; both names refer to the same
module.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import CodeType, ModuleType

# Modules of a listed package have moved with it.
MOVED = {
    "distmp.accelerate": "distmp.integrations.accelerate",
    "distmp.assembly": "distmp.training.setup",
    "distmp.bench": "distmp.commands.bench",
    "distmp.calibrate": "distmp.commands.calibrate",
    "distmp.checkpoint.export": "distmp.export.export",
    "distmp.checkpoint.weights": "distmp.export.weights",
    "distmp.doctor.facts": "distmp.commands.doctor.machine_info",
    "distmp.doctor": "distmp.commands.doctor",
    "distmp.explain": "distmp.commands.explain",
    "distmp.outcome": "distmp.engine.outcome",
    "distmp.parallel.world": "distmp.distributed.world",
    "distmp.preflight": "distmp.commands.preflight",
    "distmp.scaling.attribution": "distmp.diagnosis.attribution",
    "distmp.scaling.divergence": "distmp.engine.spike_check",
    "distmp.scaling.lockstep": "distmp.engine.rank_consistency",
    "distmp.slices": "distmp.utils.flat_shard",
    "distmp.stopping": "distmp.distributed.stopping",
    "distmp.trainer": "distmp.training.trainer",
}


def install() -> None:
    """Install the import hook for the old paths."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # First: through the old name of a package, Python's finders would load its modules again.
        sys.meta_path.insert(0, _MovedModules())


def new_name(name: str) -> str | None:
    """Return the current path of a module; None if it has not moved."""
    for old, new in MOVED.items():
        if name == old or name.startswith(f"{old}."):
            return new + name[len(old) :]
    return None


class _MovedModules:
    """Finds and loads the modules of `MOVED`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a module spec for an old path; None for any other path."""
        if new_name(fullname) is None:
            return None
        # Not a subclass of importlib.abc.Loader, whose import takes milliseconds.
        return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python create the module that `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        """Register the current module under the old name."""
        sys.modules[module.__name__] = importlib.import_module(_warned(module.__name__))

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that `python -m` runs for the old name."""
        new = _warned(fullname)
        source = f"import runpy\nrunpy.run_module({new!r}, run_name='__main__', alter_sys=True)\n"
        return compile(source, f"<{fullname}>", "exec")


def _warned(name: str) -> str:
    new = new_name(name)
    assert new is not None, f"{name} has not moved"
    # FutureWarning is shown by default, and torch uses it too.
    warnings.warn(
        f"{name} is now {new}; the old name will be removed in the next release",
        FutureWarning,
        stacklevel=3,
    )
    return new
