"""``loadkit convert``: a checkpoint becomes another one, no model in memory."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import click

from loadkit.cli.options import ModelRequest, output_options
from loadkit.cli.output import Output, human_bytes
from loadkit.cli.sizes import byte_size
from loadkit.sources.shown import shown_source
from loadkit.text import printable

__all__ = ["command"]

LISTED = 8  # lines of a list shown to people; --json has all of them
_option = click.option


@click.command("convert")
@click.argument("source")
@click.argument("target")
@_option(
    "--to",
    type=click.Choice(["safetensors", "sharded_state"]),
    default="safetensors",
    show_default=True,
    help="A Hugging Face checkpoint, or every rank's parameters. Other formats (dcp, gguf, "
    "tensorizer) are written of a model: loadkit.save(model, TARGET, save_format=...).",
)
@_option(
    "--names",
    type=click.Choice(["auto", "model", "checkpoint"]),
    default="auto",
    show_default=True,
    help="Whose tensor names: the model's on the hub, or the source's own.",
)
@_option("--tp", type=click.IntRange(min=1), default=1, metavar="N", help="Tensor parallel size.")
@_option("--pp", type=click.IntRange(min=1), default=1, metavar="N", help="Pipeline parallel size.")
@_option("--ep", type=click.IntRange(min=1), default=1, metavar="N", help="Expert parallel size.")
@_option("--dtype", default="auto", metavar="D", help="The dtype that floats get.")
@_option(
    "--max-shard-size",
    callback=byte_size,
    default="5GB",
    show_default=True,
    metavar="SIZE",
    help="Most bytes of tensors in one file.",
)
@_option("--resume", is_flag=True, help="Go on with what a killed conversion left.")
@_option("--overwrite", is_flag=True, help="Replace what is at TARGET.")
@_option("--load-format", default="auto", metavar="F", help="See 'loadkit formats'.")
@_option("--quantization", metavar="M", help="Quantisation method.")
@_option("--model-impl", default="auto", metavar="I", help="Which implementation of a model.")
@_option("--trust-remote-code", is_flag=True, help="Allow code that comes with a model.")
@_option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of LoadConfig or ModelConfig; may be repeated.",
)
@output_options
@click.pass_obj
def command(out: Output, /, **values: Any) -> int:  # fmt: skip
    """Write SOURCE, in any format, as another checkpoint: the folder TARGET.

    Its load is planned first, and what is wrong is said before a byte is written. Then tensors are
    read, cast or decoded and written a little at a time. TARGET gets its name when all of it is
    durable; what a killed run left is gone on with by --resume.
    """
    from loadkit.convert import convert

    source, target = values.pop("source"), values.pop("target")
    own = ("to", "names", "tp", "pp", "ep", "resume", "overwrite")
    given = {name: values.pop(name) for name in own}
    most = values.pop("max_shard_size")
    request = replace(ModelRequest(source), **values)
    keywords = request.keywords(progress=sys.stderr.isatty() and not out.as_json)
    keywords = {key: value for key, value in keywords.items() if value is not None}
    report = convert(source, target, max_shard_bytes=most, **given, **keywords)
    if out.as_json:
        out.emit({"ok": True, **report.to_dict()})
    else:
        _show(out, source, report)
    return 0


def _show(out: Output, source: str, report: Any) -> None:
    sizes = report.topology
    kept = f", {human_bytes(report.bytes_kept)} were there" if report.bytes_kept else ""
    ranks = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    casts = ", ".join(f"{c['from']} -> {c['to']} ({c['tensors']})" for c in report.casts)
    out.fields(
        [
            ("source", shown_source(source)),
            ("target", printable(report.path, ascii_only=False)),
            ("format", report.to if report.to == "safetensors" else f"{report.to}, {ranks}"),
            ("names", f"{report.names}: {printable(report.names_why, 400)}"),
            ("files", f"{len(report.files)}, {human_bytes(report.total_size)}{kept}"),
            ("tensors", report.tensors),
            ("casts", casts or None),
            ("seconds", f"{report.seconds:.3f}"),
        ]
    )
    for title, found in (
        ("not in the target", report.skipped),
        ("not copied", report.not_copied),
    ):
        lines = [f"{printable(name)}: {printable(why, 400)}" for name, why in found.items()]
        for line in lines[:LISTED]:
            out.line(f"{title}: {line}")
        if len(lines) > LISTED:
            out.line(f"{title}: ... {len(lines)} in all; --json lists every one")
    for text in report.warnings[:LISTED]:
        out.line(f"note: {printable(text, 400)}")
