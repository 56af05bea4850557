"""One measured run: ``python -m loadkit.bench.child SPEC`` prints its figures as one JSON line.

SPEC is JSON: ``call`` is ``module:function``, ``args`` its keyword arguments, ``measure`` those of
``measure``. The function imports and prepares, and returns a second one; only that is measured.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from loadkit.bench.measure import measure
from loadkit.errors import LoadkitError

__all__ = ["main"]


def main() -> int:
    """Run what the command line says."""
    spec = json.loads(sys.argv[1])
    module, _, name = spec["call"].partition(":")
    try:
        prepare = getattr(import_module(module), name)
        figures = measure(prepare(**spec["args"]), **spec.get("measure", {}))
    except LoadkitError as error:
        figures = {"error": error.to_dict(), "exit_code": error.exit_code}
    sys.stdout.write(json.dumps(figures) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
