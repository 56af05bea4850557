"""The package's names: sorted, all there, and torch is imported only when one is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import loadkit_layers


def test_every_public_name_exists_and_is_listed_once() -> None:
    names = list(loadkit_layers.__all__)
    assert names == sorted(set(names))
    for name in names:
        assert getattr(loadkit_layers, name) is not None
        assert name in dir(loadkit_layers)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchLayer"):
        loadkit_layers.NoSuchLayer  # noqa: B018


def test_importing_the_package_leaves_torch_alone() -> None:
    code = "import loadkit_layers, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
