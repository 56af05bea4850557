"""Patterns stay within a folder, and ** goes through any number of them."""

from __future__ import annotations

import pytest

from loadkit.file_patterns import first_fit, fits


@pytest.mark.parametrize(
    ("name", "pattern", "fit"),
    [
        ("model.safetensors", "*.safetensors", True),
        ("a/model.safetensors", "*.safetensors", False),
        ("a/model.safetensors", "*/*.safetensors", True),
        ("a/b/model.safetensors", "*/*.safetensors", False),
        ("original/consolidated.00.pth", "original/**/*", True),
        ("original/a/b/c.pth", "original/**/*", True),
        ("original", "original/**/*", False),
        ("originals/a.pth", "original/**/*", False),
        ("a/b/c.bin", "**/c.bin", True),
        ("c.bin", "**/c.bin", True),
        ("a/b/c.bin", "**", True),
        ("a/b", "a/**/b/**", True),
        ("model-1.bin", "model-[0-9].bin", True),
        ("Model.bin", "model.bin", False),
        ("a", "", False),
        ("a/b", "x/**/b", False),
    ],
)
def test_a_pattern_fits_what_it_means(name: str, pattern: str, fit: bool) -> None:
    assert fits(name, pattern) is fit


def test_the_first_that_fits_is_told() -> None:
    assert first_fit("a.bin", ["*.pt", "*.bin", "a*"]) == "*.bin"
    assert first_fit("a.bin", []) is None
