"""The harness measures what it says: known variants give known figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.generate import Llama, written
from benchmarks.harness import Benchmark, Variant, run_benchmark, table


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
    assert "failed: RuntimeError: no such luck" in table(result)


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
