"""Every benchmark: ``run_all.py [--small] [--runs N] [--only dense,moe] [--resume] [--keep]``.

Without ``--small`` the dense races are over 6 GiB and want 16 GiB of memory and 30 GiB of disk.
Results are written to tests/benchmarks/results/ and docs/benchmarks.md, and tables printed. A row
that fails is told and the others go on; the exit code is then 1. The checkpoints are deleted at the
end, unless they are to be kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import generate, races
from benchmarks.format_races import FORMAT_RACES
from benchmarks.harness import (
    Benchmark,
    Claim,
    Figures,
    Variant,
    machine,
    paused,
    run_benchmark,
    table,
)
from benchmarks.page import RESULTS, write_page


def startup(small: bool) -> Benchmark:
    """The command's help against a bare interpreter, and against importing torch."""
    return Benchmark(
        "startup",
        [
            Variant("python", "startup:start", {"args": ["-c", "pass"]}),
            Variant("import loadkit", "startup:start", {"args": ["-c", "import loadkit"]}),
            Variant("loadkit --help", "startup:cli", {"args": ["--help"]}),
            Variant("loadkit plan --help", "startup:cli", {"args": ["plan", "--help"]}),
            Variant("import torch", "startup:start", {"args": ["-c", "import torch"]}),
        ],
        base="python",
        columns=("child_cpu_s",),
    )


def trace(small: bool) -> Benchmark:
    """Tracing a weight loader against running it on real tensors."""
    folder = generate.sparse(generate.MANY, 222 if small else 1111)
    return Benchmark(
        "trace",
        [
            Variant("on real tensors", "planning:real", {"folder": str(folder)}),
            Variant("traced", "planning:trace", {"folder": str(folder)}),
        ],
        base="on real tensors",
        columns=("us_per_tensor", "cpu_us_per_tensor", "tensors", "anon_mib"),
    )


def plan(small: bool) -> Benchmark:
    """Plans of 10,000 and 20,000 tensors: twice the tensors, twice the time."""
    variants = []
    for layers in (1111, 2222):
        folder = generate.sparse(generate.MANY, layers)
        name = f"{9 * layers + 2:,} tensors"
        variants.append(Variant(name, "planning:plan", {"folder": str(folder)}))
    folder = generate.sparse(generate.MOE_MANY, generate.MOE_MANY.layers)
    mixture = "20,046 tensors, a mixture"
    variants.append(Variant(mixture, "planning:plan", {"folder": str(folder)}))
    return Benchmark(
        "plan",
        variants,
        base=variants[0].name,
        columns=("returned_s", "cpu_s", "us_per_tensor", "anon_mib", "read_gib", "ok"),
        end="cpu_s",
        claims=[
            Claim("CPU seconds, 20,000 tensors", lambda r: r["20,000 tensors"]["cpu_s"], most=2),
            Claim(
                "CPU seconds, 20,046 tensors of a mixture", lambda r: r[mixture]["cpu_s"], most=2
            ),
            Claim(
                "CPU: 20,000 tensors / 10,001",
                lambda r: races.ratio(r, "20,000 tensors", "10,001 tensors", "cpu_s"),
                most=2.2,
            ),
        ],
    )


# name -> what makes it; "dense-cold" and "tp2-cold" are from storage
BENCHMARKS: dict[str, Callable[[bool], Benchmark]] = {
    "dense": races.dense_race,
    "dense-cold": races.cold,
    "copies": races.copies,
    "libraries": races.libraries,
    "moe": races.moe_race,
    "tp2": races.tp_race,
    "tp2-cold": races.tp_cold,
    "tp4": races.tp4_race,
    "presharded": races.presharded_race,
    "startup": startup,
    "trace": trace,
    "plan": plan,
    **FORMAT_RACES,
}


def main() -> int:
    asked = _arguments()
    if asked.smoke:
        generate.SMALL = generate.TINY
    failed = False
    try:
        for name in asked.only or BENCHMARKS:
            stem = f"{name}-{'small' if asked.small else 'full'}"
            kept = paused(stem)
            if not asked.resume:
                kept.unlink(missing_ok=True)
            elif (RESULTS / f"{stem}.json").is_file() and not kept.is_file() and _is_whole(stem):
                print(f"{stem}: there already\n", flush=True)
                continue
            result = _run(name, asked, kept)
            failed |= any("error" in row for row in result["variants"].values())
            print(table(result), flush=True)
            if asked.smoke:
                kept.unlink(missing_ok=True)
                continue
            write({"size": stem.rpartition("-")[2], "machine": machine(), **result}, stem)
    finally:
        if not asked.smoke:
            write_page()
        if not asked.keep and not asked.smoke:
            generate.clear()
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="CI's size: half a GiB")
    parser.add_argument("--runs", type=int, help="runs of each variant (5; small: 3)")
    parser.add_argument("--only", help="these, with commas between", type=_names, metavar="A,B")
    parser.add_argument("--resume", action="store_true", help="go on with what was stopped")
    parser.add_argument("--keep", action="store_true", help="keep the generated checkpoints")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds of one run (900)")
    parser.add_argument("--smoke", action="store_true", help="0.1 GiB, once; keeps no results")
    asked = parser.parse_args()
    asked.small |= asked.smoke
    asked.runs = asked.runs or (1 if asked.smoke else 3 if asked.small else 5)
    return asked


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in BENCHMARKS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(BENCHMARKS)}")
    return names


def _run(name: str, asked: argparse.Namespace, kept: Path) -> Figures:
    """One race; what cannot even be prepared is a failed row of its own."""
    try:
        made = BENCHMARKS[name](asked.small)
        return run_benchmark(made, asked.runs, asked.timeout, kept)
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {error}"[:300]
        return {
            "name": name,
            "cold": name.endswith("cold"),
            "runs": 0,
            "base": "",
            "columns": [],
            "end": None,
            "variants": {"preparing": {"error": why}},
        }


def _is_whole(stem: str) -> bool:
    """Whether a race was run to its end without a failed row."""
    rows = json.loads((RESULTS / f"{stem}.json").read_text())["variants"].values()
    return not any("error" in row for row in rows)


def write(result: Figures, stem: str) -> None:
    """Keep a race as JSON and as Markdown."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    said = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
    (RESULTS / f"{stem}.md").write_text(f"{table(result)}\n{said}\n")


if __name__ == "__main__":
    sys.exit(main())
