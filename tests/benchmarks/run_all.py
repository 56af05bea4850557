"""Every benchmark: ``python tests/benchmarks/run_all.py [--small] [--runs N] [--only NAME]``.

Without ``--small`` the dense race is over 6 GiB and wants 16 GiB of memory. Results are written
to tests/benchmarks/results/, and tables printed. The checkpoints are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import dense as dense_variants
from benchmarks import generate, gguf_decode, gguf_packed
from benchmarks.harness import Benchmark, Figures, Variant, machine, run_benchmark, table

RESULTS = Path(__file__).resolve().parent / "results"


def dense(small: bool, cold: bool) -> Benchmark:
    """A dense Llama in bfloat16: returned, and every page touched."""
    folder = generate.written(generate.SMALL if small else generate.FULL)
    return Benchmark(
        "dense",
        [Variant(*parts) for parts in dense_variants.variants(folder)],
        base="transformers (unfused)",
        files=sorted(folder.glob("*.safetensors")),
        cold=cold,
    )


def startup(small: bool, cold: bool) -> Benchmark:
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


def trace(small: bool, cold: bool) -> Benchmark:
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


def plan(small: bool, cold: bool) -> Benchmark:
    """Plans of 10,000 and 20,000 tensors: twice the tensors, twice the time."""
    variants = []
    for layers in (1111, 2222):
        folder = generate.sparse(generate.MANY, layers)
        name = f"{9 * layers + 2:,} tensors"
        variants.append(Variant(name, "planning:plan", {"folder": str(folder)}))
    return Benchmark(
        "plan",
        variants,
        base=variants[0].name,
        columns=("returned_s", "cpu_s", "us_per_tensor", "anon_mib", "read_gib", "ok"),
    )


def gguf_types(small: bool, cold: bool) -> Benchmark:
    """Every quantised ggml type: millions of elements per second; the ratio is of all together."""
    variants = gguf_decode.decode_variants(1 << 21 if small else 1 << 22)
    return Benchmark(
        "gguf-decode", variants, base="gguf-py", columns=("seconds", *gguf_decode.TYPES)
    )


def gguf_header(small: bool, cold: bool) -> Benchmark:
    """A GGUF header with a great vocabulary."""
    generate.CACHE.mkdir(parents=True, exist_ok=True)
    tokens = 20_000 if small else 150_000
    path = gguf_decode.write_header(generate.CACHE / f"vocabulary-{tokens}.gguf", tokens)
    return Benchmark(
        "gguf-header",
        gguf_decode.header_variants(path),
        base="gguf-py",
        files=[path],
        columns=("cpu_s", "returned_s", "anon_mib", "tensors"),
    )


def packed(small: bool, cold: bool) -> Benchmark:
    """A GGUF load that keeps blocks packed, against reading the file once."""
    path = gguf_packed.smollm2()
    return Benchmark(
        "gguf-packed",
        gguf_packed.packed_variants(path),
        base="reading the file once",
        files=[path],
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib", "read_gib", "gib"),
    )


def gguf_load(small: bool, cold: bool) -> Benchmark:
    """SmolLM2 from its GGUF file to a ready model in bfloat16: CPU seconds besides imports."""
    path = gguf_packed.smollm2()
    return Benchmark(
        "gguf-load",
        gguf_packed.load_variants(path),
        base="transformers",
        files=[path],
        columns=("cpu_s", "returned_s", "anon_mib", "gib"),
        end="cpu_s",
        most=1 if small else 3,
    )


BENCHMARKS: dict[str, Callable[[bool, bool], Benchmark]] = {
    "dense": dense,
    "startup": startup,
    "trace": trace,
    "plan": plan,
    "gguf-decode": gguf_types,
    "gguf-header": gguf_header,
    "gguf-packed": packed,
    "gguf-load": gguf_load,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="CI's size: half a GiB")
    parser.add_argument("--runs", type=int, default=5, help="runs of each variant (5)")
    parser.add_argument("--only", choices=BENCHMARKS, action="append", help="this one (repeatable)")
    parser.add_argument("--cold", action="store_true", help="the dense race from storage, too")
    parser.add_argument("--keep", action="store_true", help="keep the generated checkpoints")
    asked = parser.parse_args()
    results: list[Figures] = []
    try:
        for name, make in BENCHMARKS.items():
            if asked.only and name not in asked.only:
                continue
            for cold in (False, True) if asked.cold and name == "dense" else (False,):
                result = run_benchmark(make(asked.small, cold), asked.runs)
                results.append(result)
                print(table(result), flush=True)
    finally:
        if not asked.keep:
            generate.clear()
    write(results, "small" if asked.small else "full")
    return 1 if any("error" in row for r in results for row in r["variants"].values()) else 0


def write(results: list[Figures], size: str) -> None:
    """Keep the results as JSON and as Markdown."""
    RESULTS.mkdir(exist_ok=True)
    about = machine()
    for result in results:
        stem = f"{result['name']}-{'cold-' if result['cold'] else ''}{size}"
        data = json.dumps({"machine": about, **result}, indent=1)
        (RESULTS / f"{stem}.json").write_text(data + "\n")
        said = ", ".join(f"{key} {value}" for key, value in about.items())
        (RESULTS / f"{stem}.md").write_text(f"{table(result)}\n{said}\n")


if __name__ == "__main__":
    sys.exit(main())
