"""The harness measures what it says: known variants give known figures."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness
from benchmarks.generate import Llama, Moe, written
from benchmarks.harness import Benchmark, Claim, Variant, run_benchmark, table
from benchmarks.page import page
from loadkit.bench import measure as measuring
from loadkit.bench.processes import ProcessError


@pytest.mark.slow
def test_known_variants_give_known_figures() -> None:
    names = {"mib": 64}
    benchmark = Benchmark(
        "check",
        [
            Variant("allocate", "self_check:allocate", names),
            Variant("forwards", "self_check:permuted", {"backwards": False}),
            Variant("backwards", "self_check:permuted", {"backwards": True}),
            Variant("broken", "self_check:fail"),
        ],
        base="allocate",
    )
    result = run_benchmark(benchmark, 1)
    rows = result["variants"]
    allocated = rows["allocate"]["median"]
    assert 95 < allocated["anon_mib"] < 110
    assert allocated["minor_faults"] > 10  # with huge pages few, without them 24,576
    assert 0.02 < allocated["returned_s"] <= allocated["touched_s"]
    assert rows["forwards"]["median"]["checksum"] == rows["backwards"]["median"]["checksum"]
    assert rows["forwards"]["median"]["checksum"] != allocated["checksum"]
    assert "no such luck" in rows["broken"]["error"]
    assert "| allocate |" in table(result)
    assert "| 1.00 |" in table(result)
    assert "RuntimeError: no such luck" in table(result)


def test_what_sampling_takes_is_no_cpu_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: Any) -> None:
        sum(range(3_000_000))

    monkeypatch.setattr(measuring._Peak, "sample", busy)
    start = time.process_time()
    figures = measuring.measure(lambda: time.sleep(0.5), with_checksum=False)
    assert figures["cpu_s"] < (time.process_time() - start) / 2


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_a_cold_run_comes_from_storage_and_a_warm_one_does_not(root: Path, cold: bool) -> None:
    folder = root / ".cache"
    folder.mkdir(exist_ok=True)
    path = folder / "harness.bin"
    path.write_bytes(bytes(32 << 20))
    variant = Variant("read", "self_check:read", {"path": str(path)})
    benchmark = Benchmark("cold", [variant], base="read", files=[path], cold=cold)
    try:
        figures: dict[str, Any] = run_benchmark(benchmark, 1)["variants"]["read"]["median"]
    finally:
        path.unlink()
    assert figures["bytes"] == 32 << 20
    assert figures["read_gib"] >= 1 / 32
    if cold and figures["disk_gib"] == 0:
        pytest.skip("this file system does not let go of its pages")
    assert (figures["disk_gib"] > 0.03) == cold


def test_what_was_measured_is_kept_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def fake(variant: Variant, timeout: float) -> dict[str, float]:
        calls.append(variant.name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return {"returned_s": float(len(calls))}

    monkeypatch.setattr(harness, "_run_once", fake)
    race = Benchmark("r", [Variant("a", "x:a"), Variant("b", "x:b")], "a", columns=["returned_s"])
    keep = tmp_path / "kept" / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(race, 3, keep=keep)
    assert calls == ["a", "b", "a", "b"]
    result = run_benchmark(race, 3, keep=keep)
    assert calls[4:] == ["b", "a", "b"]
    assert [run["returned_s"] for run in result["variants"]["a"]["runs"]] == [1, 3, 6]
    assert not keep.exists()


def test_a_row_that_fails_or_lacks_a_package_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(variant: Variant, timeout: float) -> dict[str, float]:
        if variant.name == "bad":
            raise ProcessError("it broke")
        return {"returned_s": 2.0}

    monkeypatch.setattr(harness, "_run_once", fake)
    variants = [
        Variant("good", "x:a"),
        Variant("bad", "x:b"),
        Variant("away", "x:c", needs=["no_such_package"]),
    ]
    claims = [
        Claim("good is fast", lambda rows: rows["good"]["returned_s"], most=3),
        Claim("good is slow", lambda rows: rows["good"]["returned_s"], least=3),
        Claim("bad is fast", lambda rows: rows["bad"]["returned_s"], most=3),
    ]
    race = Benchmark("r", variants, "good", columns=["returned_s"], claims=claims)
    result = run_benchmark(race, 2, keep=tmp_path / "r.json")
    assert [claim["ok"] for claim in result["claims"]] == [True, False, None]
    text = table(result)
    assert "| good | 2 | 1.00 |" in text
    assert "| bad | failed: it broke |" in text
    assert "| away | skipped: not installed: no_such_package" in text
    assert "good is slow (at least 3): 2 - **not met**" in text
    shown = page([{**result, "size": "small", "machine": {"cpus": 2}}])
    assert "cpus 2" in shown
    assert "not met" not in shown  # claims are about full sizes
    assert "not met" in page([{**result, "size": "full", "machine": {"cpus": 2}}])


def test_a_table_has_words_units_and_the_floor_beside_each_row() -> None:
    rows = {
        "floor: one buffer, over and over": {"median": {"touched_s": 1.0, "anon_mib": 16.0}},
        "theirs": {"median": {"touched_s": 4.0, "anon_mib": 4096.0}},
        "ours": {"median": {"touched_s": 2.0}},
        "away": {"skipped": "not installed: x"},
    }
    result: dict[str, Any] = {"name": "r", "cold": False, "runs": 1, "base": "theirs",
                              "columns": ["touched_s", "anon_mib"], "variants": rows}  # fmt: skip
    lines = table(result).splitlines()
    assert lines[2] == "| | touched, s | anonymous, MiB | touched / theirs | touched / floor |"
    assert "| ours | 2 | | 0.50 | 2.00 |" in [line.replace("|  |", "| |") for line in lines]
    assert {line.count("|") for line in lines[2:8] if line} == {6}
    many = [f"T{number}" for number in range(13)]
    turned = {**result, "base": "x", "columns": many, "variants": {"x": {"median": {"T3": 5.0}}}}
    shown = table(turned).splitlines()
    assert shown[2:4] == ["| | x |", "|---|---:|"]
    assert "| T3 | 5 |" in shown


def test_a_generated_mixture_has_the_tensors_that_its_name_says() -> None:
    shapes = Moe("m", 8, 1024, 16, 4, 64, 768, 64, 32000, 3).shapes()
    assert len(shapes) == 1611


def test_a_generated_checkpoint_is_what_transformers_and_safetensors_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import safe_open

    from benchmarks import generate

    monkeypatch.setattr(generate, "CACHE", tmp_path)
    model = Llama("tiny", 2, 64, 4, 2, 96, 256, 2)
    folder = written(model)
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                assert tensor.isfinite().all()
                assert tensor.std() > 0.01
                found[name] = tuple(tensor.shape)
    assert found == model.shapes()
