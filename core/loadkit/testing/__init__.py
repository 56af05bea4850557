"""Contract classes: tests that a loader or a reader of anybody's must pass.

Subclass one in a test module, say what is asked for, and run pytest::

    from loadkit.testing import LoaderContract

    class TestMyFormat(LoaderContract):
        load_format = "my_format"

        def write(self, folder, weights, config):
            ...

pytest is needed for the classes only: importing this package does not import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadkit.testing.checkpoint import contract_config as contract_config
    from loadkit.testing.checkpoint import contract_weights as contract_weights
    from loadkit.testing.checkpoint import write_checkpoint as write_checkpoint
    from loadkit.testing.loader_contract import LoaderContract as LoaderContract
    from loadkit.testing.model import ContractModel as ContractModel
    from loadkit.testing.reader_contract import ReaderContract as ReaderContract

__all__ = [
    "ContractModel",
    "LoaderContract",
    "ReaderContract",
    "contract_config",
    "contract_weights",
    "write_checkpoint",
]

_MODULES = {
    "ContractModel": "model",
    "LoaderContract": "loader_contract",
    "ReaderContract": "reader_contract",
    "contract_config": "checkpoint",
    "contract_weights": "checkpoint",
    "write_checkpoint": "checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'loadkit.testing' has no attribute {name!r}")
    try:
        module = import_module(f"loadkit.testing.{_MODULES[name]}")
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        from loadkit.errors import NotInstalledError

        raise NotInstalledError(
            f"loadkit.testing.{name} is made of pytest tests, and pytest is not installed",
            hint="pip install pytest",
        ) from error
    return getattr(module, name)
