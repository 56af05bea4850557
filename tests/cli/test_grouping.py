"""Rows of a plan, folded."""

from __future__ import annotations

from helpers.cli import Row
from loadkit.cli.grouping import fold, grouped, ranges


def test_ranges_join_neighbours() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


def test_fold_shows_the_range_of_each_place_that_varies() -> None:
    names = [f"m.layers.{layer}.experts.{e}.w1" for layer in (0, 1) for e in range(4)]
    assert fold(names) == "m.layers.{0-1}.experts.{0-3}.w1"
    assert fold(["layers.3.fc1.weight"]) == "layers.3.fc1.weight"


def test_only_whole_components_are_numbers() -> None:
    assert fold(["h.0.fc1", "h.1.fc1"]) == "h.{0-1}.fc1"


def test_a_number_too_long_to_be_a_layer_does_not_break_folding() -> None:
    assert fold(["a." + "9" * 5000, "a." + "8" * 5000]).startswith("a.")


def test_layers_fold_to_one_line_and_other_shapes_stay_apart() -> None:
    rows = [Row(f"l.{i}.up", f"l.{i}.gate_up", offset=32) for i in range(32)]
    rows.append(Row("l.32.up", "l.32.gate_up", size=(2, 8), offset=32))
    rows.append(Row(None, "l.0.pad", kind="fill"))
    lines = grouped(row.to_dict() for row in rows)
    assert [line[0] for line in lines] == [32, 1, 1]
    assert lines[0] == [
        32, "copy", "exact", "l.{0-31}.up", "[4, 8]", "l.{0-31}.gate_up", "[4, 8] @ 32"
    ]  # fmt: skip
    assert lines[2][3] is None
