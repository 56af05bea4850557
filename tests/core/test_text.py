"""Untrusted names are shown on one line, escaped and short."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadkit.text import nearest, printable


@given(st.text(alphabet=st.characters(codec=None)), st.booleans(), st.integers(40, 300))
def test_nothing_unprintable_is_left_and_the_limit_holds(
    name: str, ascii_only: bool, limit: int
) -> None:
    shown = printable(name, limit, ascii_only=ascii_only)
    assert len(shown) <= limit
    assert all(unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Co", "Cn") for c in shown)
    assert not ascii_only or shown.isascii()


@given(st.text(), st.text())
def test_different_short_names_are_shown_differently(a: str, b: str) -> None:
    if a != b:
        assert printable(a, 10_000) != printable(b, 10_000)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        pytest.param("\x1b]0;pwn\x07\x1b[2J", r"\x1b]0;pwn\x07\x1b[2J", id="S44"),
        pytest.param("<script>", "<script>", id="S45"),
        pytest.param("a\x00b", r"a\x00b", id="S47"),
        pytest.param("a\nERROR: fake", r"a\nERROR: fake", id="S48"),
        pytest.param("C:\\x", r"C:\\x", id="S49"),
        pytest.param("a\u202egnp.exe", r"a\u202egnp.exe", id="bidi"),
        pytest.param("\x9b2J", r"\x9b2J", id="c1"),
        pytest.param("\ud800", r"\ud800", id="S52"),
        pytest.param("l\u0430yers.0", r"l\u0430yers.0", id="F36"),
        pytest.param("\U0001f600", r"\U0001f600", id="astral"),
    ],
)
def test_each_kind_of_name(name: str, shown: str) -> None:
    assert printable(name) == shown


def test_S51_a_name_of_a_megabyte_is_cut_and_its_length_told() -> None:
    shown = printable("n" * 1_000_000)
    assert len(shown) <= 200
    assert shown.endswith("... (1000000 characters)")


def test_paths_keep_their_letters_but_not_their_tricks() -> None:
    assert printable("/data/Modèles/模型", ascii_only=False) == "/data/Modèles/模型"
    assert printable("/data/\u202ex\x1b", ascii_only=False) == r"/data/\u202ex\x1b"


def test_nearest_names() -> None:
    formats = ["safetensors", "gguf", "runai_streamer", "sharded_state"]
    assert nearest("safetensor", formats) == ["safetensors"]
    assert nearest("SafeTensors", formats) == ["safetensors"]
    assert nearest("sharded-state", formats) == ["sharded_state"]
    assert nearest("runai", formats) == ["runai_streamer"]
    assert nearest("zzzz", formats) == []
    assert nearest("x" * 1_000_000, formats) == []
