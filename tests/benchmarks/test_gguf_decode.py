"""The GGUF races give both sides the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gguf_decode
from loadkit_gguf.encodings import ENCODINGS


def test_every_type_that_gguf_py_decodes_is_raced() -> None:
    assert set(gguf_decode.TYPES) == set(ENCODINGS) - {"Q1_0"}


@pytest.mark.parametrize("side", ["gguf_py", "ours", "ours_into"])
def test_a_race_gives_a_speed_for_every_type(side: str) -> None:
    figures = getattr(gguf_decode, side)(8)()
    assert set(figures) == {*gguf_decode.TYPES, "seconds"}
    assert all(speed > 0 for speed in figures.values())


def test_both_readers_see_the_header_that_was_written(tmp_path: Path) -> None:
    path = gguf_decode.write_header(tmp_path / "v.gguf", 500)
    ours = gguf_decode.header_ours(str(path))()
    assert ours == {"tensors": 290, "tokens": 500}
    assert gguf_decode.header_gguf_py(str(path))() == {"tensors": 290}
