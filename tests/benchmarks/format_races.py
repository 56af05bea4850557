"""The races of load formats, each against its library used alone."""

from __future__ import annotations

from benchmarks import (
    bitsandbytes_format,
    generate,
    gguf_decode,
    gguf_export,
    gguf_packed,
    object_store,
    pt_catalogue,
    pt_format,
    tensorizer_format,
)
from benchmarks.harness import Benchmark, Claim
from benchmarks.races import ratio

__all__ = ["FORMAT_RACES"]


def gguf_types(small: bool) -> Benchmark:
    """Every quantised ggml type: millions of elements per second; the ratio is of all together."""
    variants = gguf_decode.decode_variants(1 << 21 if small else 1 << 22)
    basic = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *(t for t in gguf_decode.TYPES if "_K" in t))
    return Benchmark(
        "gguf-decode",
        variants,
        base="gguf-py",
        columns=("seconds", *gguf_decode.TYPES),
        about="The types' rows are millions of elements a second; the ratio is of all together.",
        claims=[
            Claim("basic and K types, the slowest: loadkit / gguf-py",
                  lambda r: min(ratio(r, "loadkit", "gguf-py", t) for t in basic), least=3),
            Claim("every type, the slowest: loadkit / gguf-py",
                  lambda r: min(ratio(r, "loadkit", "gguf-py", t) for t in gguf_decode.TYPES),
                  least=1),
        ],
    )  # fmt: skip


def gguf_header(small: bool) -> Benchmark:
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
        about=f"{tokens:,} tokens, their types, and as many merges.",
        claims=[
            Claim("CPU: loadkit / gguf-py", lambda r: ratio(r, "loadkit", "gguf-py", "cpu_s"),
                  most=1),
        ],
    )  # fmt: skip


def gguf_blocks(small: bool) -> Benchmark:
    """A GGUF load that keeps blocks packed, against reading the file once."""
    path = gguf_packed.smollm2()
    return Benchmark(
        "gguf-packed",
        gguf_packed.packed_variants(path),
        base="reading the file once",
        files=[path],
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib", "read_gib", "gib"),
    )


def gguf_load(small: bool) -> Benchmark:
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
        about="SmolLM2-135M in Q4_1, to a model in bfloat16. gguf-py makes no model.",
        claims=[
            Claim("CPU seconds of loadkit", lambda r: r["loadkit"]["cpu_s"], most=3),
            Claim("CPU: transformers / loadkit",
                  lambda r: ratio(r, "transformers", "loadkit", "cpu_s"), least=8),
            Claim("CPU: loadkit / gguf-py",
                  lambda r: ratio(r, "loadkit", "gguf-py, tensors alone", "cpu_s"), most=1),
        ],
    )  # fmt: skip


def gguf_writing(small: bool) -> Benchmark:
    """A Llama in memory to a GGUF file, against gguf-py with the same tensors."""
    model = generate.TINY if small else generate.SMALL
    files = gguf_export.exported(model)
    return Benchmark(
        "gguf-export",
        gguf_export.export_variants(model, files),
        base="gguf-py, F16",
        columns=("cpu_s", "returned_s", "anon_mib", "file_gib"),
        end="cpu_s",
        most=1 if small else 3,
        about="Both files are durable and hold equal bytes. *returned* is the disk's.",
        claims=[
            Claim(f"CPU, {kind}: loadkit / gguf-py",
                  lambda r, kind=kind: ratio(r, f"loadkit, {kind}", f"gguf-py, {kind}", "cpu_s"),
                  most=1)
            for kind in gguf_export.KINDS
        ],
    )  # fmt: skip


def gguf_reading(small: bool) -> Benchmark:
    """GGUF files of some types in bfloat16, against gguf-py, which makes no model."""
    files = gguf_export.exported(generate.TINY if small else generate.SMALL)
    return Benchmark(
        "gguf-import",
        gguf_export.import_variants(files),
        base="gguf-py, F16",
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib", "gib"),
        end="cpu_s",
        most=1 if small else 3,
        about="Every tensor in bfloat16 in the end; loadkit's are a model's.",
        claims=[
            Claim(f"{kind}, touched: loadkit / gguf-py",
                  lambda r, kind=kind: ratio(r, f"loadkit, {kind}", f"gguf-py, {kind}"), most=1)
            for kind in gguf_export.KINDS
        ],
    )  # fmt: skip


def pt_archive(small: bool) -> Benchmark:
    """What is in a ``.bin`` of 20,000 tensors."""
    generate.CACHE.mkdir(parents=True, exist_ok=True)
    count = 20_000
    path = pt_catalogue.write_many(generate.CACHE / f"many-{count}.bin", count)
    return Benchmark(
        "pt-catalogue",
        pt_catalogue.catalogue_variants(path),
        base="torch.load",
        files=[path],
        columns=("cpu_s", "returned_s", "anon_mib", "tensors"),
        end="cpu_s",
        about="torch also reads the tensors, which are small.",
        claims=[
            Claim("CPU: loadkit / torch.load", lambda r: ratio(r, "loadkit", "torch.load", "cpu_s"),
                  most=0.5),
        ],
    )  # fmt: skip


def pt_load(small: bool) -> Benchmark:
    """``.bin`` files into a module, against ``torch.load``."""
    folder = pt_format.archived(generate.SMALL if small else generate.MIDDLE)
    return Benchmark(
        "pt",
        pt_format.pt_variants(folder),
        base="torch.load",
        files=sorted(folder.glob("*.bin")),
        about="The same module, one parameter for each tensor; torch's tensors are assigned to it.",
        claims=[
            Claim("own memory, touched: loadkit / torch.load",
                  lambda r: ratio(r, "loadkit, alias never", "torch.load"), most=1),
            Claim("mapped, touched: loadkit / torch.load",
                  lambda r: ratio(r, "loadkit", "torch.load, mapped"), most=1),
        ],
    )  # fmt: skip


def npcache(small: bool) -> Benchmark:
    """The cache of numpy files, against ``numpy.load`` of the same files."""
    folder = pt_format.archived(generate.SMALL if small else generate.MIDDLE)
    files = pt_format.cache_files(folder)
    return Benchmark(
        "npcache",
        pt_format.npcache_variants(folder, files),
        base="numpy.load",
        files=files,
        about="numpy's arrays are the files' bytes; loadkit's are a model's parameters.",
        claims=[
            Claim("own memory, touched: loadkit / numpy.load",
                  lambda r: ratio(r, "loadkit, alias never", "numpy.load"), most=1),
        ],
    )  # fmt: skip


def bitsandbytes_folders(small: bool) -> Benchmark:
    """A quantised folder, and a plain one that is quantised while it loads, by transformers too."""
    plain, packed = bitsandbytes_format.write_folders(generate.CACHE, 8 if small else 32)
    stored, online = "nf4 folder", "quantising"
    return Benchmark(
        "bitsandbytes",
        bitsandbytes_format.variants(plain, packed),
        base=f"transformers, {stored}",
        files=[plain / "model.safetensors", packed / "model.safetensors"],
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib"),
        end="cpu_s",
        most=1 if small else 3,
        about="bitsandbytes alone makes no model, and its mapped tensors are not copied.",
        claims=[
            Claim("quantising, CPU: loadkit / bitsandbytes alone",
                  lambda r: ratio(r, f"loadkit, {online}", f"bitsandbytes alone, {online}",
                                  "cpu_s"), most=1.05),
            *(Claim(f"{word}, CPU: loadkit / transformers",
                    lambda r, word=word: ratio(r, f"loadkit, {word}", f"transformers, {word}",
                                               "cpu_s"), most=1)
              for word in (stored, online)),
        ],
    )  # fmt: skip


def tensorizer_file(small: bool) -> Benchmark:
    """A tensorizer file into a module's parameters, with its hashes compared and without."""
    path = tensorizer_format.write_file(
        generate.CACHE / f"tensors-{small}.tensors", 256 if small else 2048
    )
    return Benchmark(
        "tensorizer",
        tensorizer_format.variants(path),
        base="tensorizer, no hashes",
        files=[path],
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib", "gib"),
        claims=[
            Claim(f"{word}, touched: loadkit / tensorizer",
                  lambda r, word=word: ratio(r, f"loadkit, {word}", f"tensorizer, {word}"),
                  most=1.05)
            for word in ("no hashes", "hashes")
        ],
    )  # fmt: skip


def s3(small: bool) -> Benchmark:
    """A checkpoint streamed from a bucket, by the streamer and by loadkit."""
    folder = generate.written(generate.TINY if small else generate.SMALL)
    return Benchmark(
        "s3",
        object_store.variants(folder),
        base="runai streamer",
        columns=("cpu_s", "returned_s", "touched_s", "anon_mib", "fetched_gib"),
        end="cpu_s",
        most=1 if small else 3,
        about="The server is slow and shares the cores: CPU, of this side, is what counts.",
        claims=[
            Claim("CPU: loadkit / runai streamer",
                  lambda r: ratio(r, "loadkit", "runai streamer", "cpu_s"), most=1),
            Claim("CPU: loadkit, runai_streamer / runai streamer",
                  lambda r: ratio(r, "loadkit, runai_streamer", "runai streamer", "cpu_s"),
                  most=1.05),
        ],
    )  # fmt: skip


FORMAT_RACES = {
    "gguf-decode": gguf_types,
    "gguf-header": gguf_header,
    "gguf-packed": gguf_blocks,
    "gguf-load": gguf_load,
    "gguf-export": gguf_writing,
    "gguf-import": gguf_reading,
    "pt-catalogue": pt_archive,
    "pt": pt_load,
    "npcache": npcache,
    "bitsandbytes": bitsandbytes_folders,
    "tensorizer": tensorizer_file,
    "s3": s3,
}
