"""``loadkit inspect``: what lies in a checkpoint's files; no model and no config are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click

from loadkit.cli.options import output_options
from loadkit.cli.output import Output, human_bytes
from loadkit.cli.settings import read_settings
from loadkit.errors import OptionError
from loadkit.sources.shown import shown_source

__all__ = ["command"]

# The suffix of a weight file -> its format. A format that is not read here is read by the loader
# of that name, if it has a class method ``read_header(file)`` like the one of safetensors.
SUFFIXES = {
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".bin": "pt",
    ".pt": "pt",
    ".pth": "pt",
    ".tensors": "tensorizer",
    ".distcp": "dcp",
    ".metadata": "dcp",
    ".json": "json",
}
WEIGHTS = ("safetensors", "gguf", "pt", "tensorizer", "dcp")


@click.command("inspect")
@click.argument("source")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A LoadConfig field.")
@output_options
@click.pass_obj
def command(out: Output, source: str, settings: tuple[str, ...]) -> int:
    """List SOURCE's files, their formats, and every tensor: dtype, shape, file, offset, bytes."""
    document = _inspect(source, settings)
    if out.as_json:
        out.emit(document)
    else:
        _show(out, document)
    return 0


def _inspect(uri: str, settings: Iterable[str]) -> dict[str, Any]:
    from loadkit.detect import kind_of
    from loadkit.file_headers import header_of, takes_weights_key
    from loadkit.sources import open_source
    from loadkit.text import printable

    files: list[dict[str, Any]] = []
    tensors: list[dict[str, Any]] = []
    metadata: dict[str, Mapping[str, Any]] = {}
    load_config, _, _ = read_settings(settings)
    key, followed = load_config.weights_key, False
    with open_source(uri, load_config) as source:
        for info in source.list():
            kind = _format_of(info.name)
            read = kind in WEIGHTS and kind_of(info.name.rpartition("/")[2]) != "training"
            header = header_of(source.open(info.name), kind, key) if read else None
            followed = followed or (read and key is not None and takes_weights_key(kind))
            files.append(
                {
                    "name": info.name,
                    "size": info.size,
                    "format": kind,
                    "tensors": None if header is None else len(header.tensors),
                }
            )
            if header is None:
                continue
            if header.metadata:
                metadata[info.name] = dict(header.metadata)
            tensors += [
                {
                    "name": tensor.name,
                    "dtype": tensor.dtype,
                    "shape": list(tensor.shape),
                    "file": tensor.file.name,
                    "offset": tensor.offset,
                    "bytes": tensor.nbytes,
                }
                for tensor in header.tensors
            ]
    if key is not None and not followed:
        raise OptionError(
            f"LoadConfig has weights_key={printable(repr(key), 60)}, and no .bin, .pt or .pth file "
            "lies here",
            detail={"options": ["weights_key"]},
            hint="leave it out",
        )
    return {
        "ok": True,
        "source": shown_source(uri),
        "formats": sorted({file["format"] for file in files} & set(WEIGHTS)),
        "files": files,
        "tensors": tensors,
        "metadata": metadata,
    }


def _format_of(name: str) -> str | None:
    """A file's format by its suffix; None for one that loadkit has nothing to say of."""
    _, dot, suffix = name.rpartition(".")
    return SUFFIXES.get(dot + suffix)


def _show(out: Output, document: Mapping[str, Any]) -> None:
    files, tensors = document["files"], document["tensors"]
    total = sum(tensor["bytes"] for tensor in tensors)
    formats = ", ".join(document["formats"]) or "no weight files"
    out.fields(
        [
            ("source", document["source"]),
            ("formats", formats),
            ("tensors", f"{len(tensors)}, {human_bytes(total)}"),
        ]
    )
    out.line()
    out.table(
        ["file", "format", "size", "tensors"],
        [[f["name"], f["format"], human_bytes(f["size"]), f["tensors"]] for f in files],
        right=["size", "tensors"],
    )
    pairs = [
        [file, key, value]
        for file, found in document["metadata"].items()
        for key, value in found.items()
    ]
    if pairs:
        out.line()
        out.table(["file", "metadata", "value"], pairs)
    if tensors:
        out.line()
        keys = ["name", "dtype", "shape", "file", "offset", "bytes"]
        out.table(keys, [[t[key] for key in keys] for t in tensors], right=["offset", "bytes"])
