"""Contract tests that start a process of their own are slow ones here; a small model by format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from contract.formats import MatrixFormat
    from helpers.format_models import Model


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.startswith("test_in_a_process_of_its_own"):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model of one layer, with heads that three ranks can share."""
    from helpers.format_models import TINY, made

    return made(tmp_path_factory.mktemp("tiny"), TINY)


@pytest.fixture(scope="session")
def in_format(
    tiny: Model, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[MatrixFormat], Path]:
    """``in_format(form)`` is the folder of that model in a format; nobody writes into it."""
    from helpers.format_models import written

    root, found = tmp_path_factory.mktemp("by-format"), dict[str, Path]()

    def folder_of(form: MatrixFormat) -> Path:
        if form.name not in found:
            found[form.name] = written(form, tiny, root / f"f{len(found)}" / "model")
        return found[form.name]

    return folder_of
