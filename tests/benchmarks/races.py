"""The races of reading, with what their figures must show at full size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from benchmarks import dense, generate, moe, presharded, ranks
from benchmarks.harness import Benchmark, Claim, Figures, Variant

__all__ = [
    *("cold", "copies", "dense_race", "libraries", "moe_race", "presharded_race"),
    *("ratio", "tp4_race", "tp_cold", "tp_race"),
]

Rows = Mapping[str, Figures]
TRANSFORMERS, UNFUSED = "transformers (unfused)", "loadkit unfused"
VLLM, FUSED = "the vLLM way (fused)", "loadkit fused"
FLOOR = "floor: one buffer, over and over"


def ratio(rows: Rows, over: str, under: str, key: str = "touched_s") -> float:
    """One variant's figure over another's."""
    return float(rows[over][key]) / float(rows[under][key])


def weights(folder: Path) -> list[Path]:
    """The files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


def dense_race(small: bool) -> Benchmark:
    """A dense Llama in bfloat16: returned, and every page touched."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    tensors = None if small else _tensorized(folder)
    return Benchmark(
        "dense",
        [Variant(**row) for row in dense.variants(folder, not small, tensors)],
        base=TRANSFORMERS,
        files=weights(folder),
        about="Every process reads the same warm files; all hold equal weights.",
        claims=[
            Claim("unfused, touched: loadkit / transformers",
                  lambda r: ratio(r, UNFUSED, TRANSFORMERS), most=1.15),
            Claim("unfused, returned: loadkit / transformers",
                  lambda r: ratio(r, UNFUSED, TRANSFORMERS, "returned_s"), most=1.15),
            Claim("fused, touched: the vLLM way / loadkit",
                  lambda r: ratio(r, VLLM, FUSED), least=5),
            Claim("fused: anonymous GiB", lambda r: r[FUSED]["anon_mib"] / 1024, most=1.1),
        ],
    )  # fmt: skip


def _tensorized(folder: Path) -> Path | None:
    """The checkpoint in tensorizer's format, beside it; None where that is not installed."""
    if find_spec("tensorizer") is None:
        return None
    path = folder.with_name(f"{folder.name}.tensors")
    if not path.is_file():
        part = path.with_suffix(".part")
        script = "benchmarks.peers"
        tests = str(Path(__file__).resolve().parent.parent)
        code = f"import sys; sys.path.insert(0, {tests!r}); import runpy; " \
            f"sys.argv = ['', {str(folder)!r}, {str(part)!r}]; " \
            f"runpy.run_module({script!r}, run_name='__main__')"  # fmt: skip
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        part.rename(path)
    return path


def libraries(small: bool) -> Benchmark:
    """Load formats that a library reads for, against the library used alone."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    rows = dense.library_variants(folder)
    alone = {"runai_streamer": "runai streamer", "fastsafetensors": "fastsafetensors, buffered"}
    return Benchmark(
        "libraries",
        [Variant(**row) for row in rows],
        base="runai streamer",
        files=weights(folder),
        about="One parameter for each tensor; all own their memory. A load is the whole line.",
        claims=[
            Claim(f"returned: loadkit, {name} / {other}",
                  lambda r, our=f"loadkit, {name}", other=other: ratio(r, our, other, "returned_s"),
                  most=1.05)
            for name, other in alone.items()
        ],
    )  # fmt: skip


def copies(small: bool) -> Benchmark:
    """Copies into memory that was touched before, against ``preadv`` alone."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    at = {"folder": str(folder)}
    limit, ours = "preadv into one touched buffer", "loadkit into a live, touched model"
    return Benchmark(
        "copies",
        [Variant(limit, "dense:limit_touched", at), Variant(ours, "dense:into_touched", at)],
        base=limit,
        files=weights(folder),
        columns=("read_s", "plan_s", "cpu_s", "anon_mib", "minor_faults"),
        end="read_s",
        about="Two threads each.",
        claims=[
            Claim("speed of the read step / the limit's",
                  lambda r: ratio(r, limit, ours, "read_s"), least=0.85),
        ],
    )  # fmt: skip


def moe_race(small: bool) -> Benchmark:
    """A mixture of 64 experts in 8 layers, into fused experts."""
    folder = generate.written(generate.MOE_SMALL if small else generate.MOE)
    return Benchmark(
        "moe",
        [Variant(**row) for row in moe.variants(folder)],
        base="transformers",
        files=weights(folder),
        most=2 if small else None,
        claims=[
            Claim("touched: transformers / loadkit",
                  lambda r: ratio(r, "transformers", "loadkit"), least=4),
            Claim("anonymous memory / weights",
                  lambda r: r["loadkit"]["anon_mib"] / 1024 / r["loadkit"]["gib"], most=1.05),
        ],
    )  # fmt: skip


def tp_race(small: bool) -> Benchmark:
    """Two ranks, each a process of its own, at the same time."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    return Benchmark(
        "tp2",
        [Variant(**row) for row in ranks.variants(folder, 2)],
        base="the vLLM way",
        files=weights(folder),
        most=1 if small else None,
        columns=("rank_returned_s", "rank_touched_s", "rank_cpu_s", "rank_anon_mib", "rank_gib"),
        end="rank_touched_s",
        about="Figures are those of the slowest and of the largest rank.",
        claims=[
            Claim("touched, slowest rank: the vLLM way / loadkit",
                  lambda r: ratio(r, "the vLLM way", "loadkit", "rank_touched_s"), least=2.5),
            Claim("a rank's anonymous memory / (its shard + 5 % + 64 MiB)",
                  lambda r: _over_shard(r["loadkit, alias never"]), most=1),
        ],
    )  # fmt: skip


def tp4_race(small: bool) -> Benchmark:
    """Four ranks at the same time: memory, not speed, on a machine of fewer cores."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    return Benchmark(
        "tp4",
        [Variant(**row) for row in ranks.variants(folder, 4)[:3]],
        base="the vLLM way",
        files=weights(folder),
        columns=("rank_returned_s", "rank_touched_s", "rank_cpu_s", "rank_anon_mib", "rank_gib"),
        end="rank_touched_s",
        most=1 if small else 3,
        about="Figures are those of the slowest and of the largest rank.",
        claims=[
            Claim("a rank's anonymous memory / (its shard + 5 % + 64 MiB)",
                  lambda r: _over_shard(r["loadkit, alias never"]), most=1),
        ],
    )  # fmt: skip


def _over_shard(row: Figures) -> float:
    return float(row["rank_anon_mib"]) / (1024 * float(row["rank_gib"]) * 1.05 + 64)


def tp_cold(small: bool) -> Benchmark:
    """Two ranks from storage: what they take from it together."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    size = sum(path.stat().st_size for path in weights(folder)) / 2**30
    return Benchmark(
        "tp2",
        [Variant(**row) for row in ranks.variants(folder, 2)],
        base="the vLLM way",
        files=weights(folder),
        most=1 if small else None,
        cold=True,
        columns=("rank_touched_s", "rank_cpu_s", "rank_anon_mib", "disk_gib_all", "read_gib_all"),
        end="rank_touched_s",
        about=f"The checkpoint has {size:.2f} GiB; *from storage* is of all ranks together.",
        claims=[
            Claim("from storage, all ranks / checkpoint",
                  lambda r: r["loadkit"]["disk_gib_all"] / size, most=1.02),
            Claim("with broadcast: from storage, all ranks / checkpoint",
                  lambda r: r["loadkit, broadcast"]["disk_gib_all"] / size, most=1.005),
        ],
    )  # fmt: skip


def cold(small: bool) -> Benchmark:
    """The dense race from storage. ``disk_gib`` shows that it was."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    return Benchmark(
        "dense",
        [Variant(**row) for row in dense.variants(folder, False, None)],
        base=FLOOR,
        files=weights(folder),
        most=1 if small else None,
        cold=True,
        claims=[
            Claim("unfused, touched: speed / raw sequential read",
                  lambda r: ratio(r, FLOOR, UNFUSED), least=0.9),
            Claim("fused, touched: speed / raw sequential read",
                  lambda r: ratio(r, FLOOR, FUSED), least=0.9),
        ],
    )  # fmt: skip


def presharded_race(small: bool) -> Benchmark:
    """Rank files at their own topology."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    at = presharded.saved(folder)
    buffer, ours = "reading into one buffer", "loadkit, sharded_state"
    return Benchmark(
        "presharded",
        [Variant(**row) for row in presharded.variants(at)],
        base=buffer,
        files=weights(at),
        columns=("read_s", "returned_s", "touched_s", "cpu_s", "anon_mib"),
        end="read_s",
        claims=[
            Claim("read step / reading into one buffer",
                  lambda r: ratio(r, ours, buffer, "read_s"), most=0.02),
            Claim("touched: loadkit / safetensors",
                  lambda r: ratio(r, ours, "safetensors, assigned"), most=1.05),
        ],
    )  # fmt: skip
