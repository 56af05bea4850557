"""``python -m loadkit.cli`` is the ``loadkit`` script."""

from __future__ import annotations

import sys

from loadkit.cli import main

sys.exit(main())
