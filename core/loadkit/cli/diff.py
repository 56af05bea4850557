"""``loadkit diff``: what two checkpoints have that the other has not."""

from __future__ import annotations

from typing import Any

import click

from loadkit.cli.options import ModelRequest, output_options
from loadkit.cli.output import Output, human_bytes
from loadkit.options import unknown_option
from loadkit.text import printable

__all__ = ["command", "comparison_options"]

LISTED = 50  # differences shown to people; --json has all of them
_option = click.option


@click.command("diff")
@click.argument("a")
@click.argument("b")
@_option(
    "--names",
    type=click.Choice(["auto", "model", "checkpoint"]),
    default="auto",
    show_default=True,
    help="Whose tensor names: the model's on the hub, or the files' own.",
)
@_option(
    "--tolerance",
    type=click.FloatRange(min=0),
    metavar="T",
    help="Elements may differ by T times the larger of 1 and their size, and dtypes too.",
)
@_option("--dtype", default="auto", metavar="D", help="With model names: the parameters' dtype.")
@_option("--load-format", default="auto", metavar="F", help="A's; see 'loadkit formats'.")
@_option("--load-format-b", default="auto", metavar="F", help="B's.")
@_option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="A field of LoadConfig or ModelConfig; may be repeated.",
)
@_option("--set-a", multiple=True, metavar="KEY=VALUE", help="A field of LoadConfig, for A alone.")
@_option("--set-b", multiple=True, metavar="KEY=VALUE", help="The same for B.")
@output_options
@click.pass_obj
def command(
    out: Output,
    a: str,
    b: str,
    names: str,
    tolerance: float | None,
    dtype: str,
    load_format: str,
    load_format_b: str,
    settings: tuple[str, ...],
    set_a: tuple[str, ...],
    set_b: tuple[str, ...],
) -> int:  # fmt: skip
    """Compare the tensors of A and B, two checkpoints in any formats.

    Which tensors there are, their shapes, dtypes and every bit; different formats are compared
    under the names of the model's own checkpoint. The exit code is 1 where they differ.
    """
    from loadkit.diff import diff

    keywords = comparison_options(dtype, settings)
    keywords["load_config"] = tuple(_config_of(settings, own) for own in (set_a, set_b))
    report = diff(
        a,
        b,
        names=names,
        tolerance=tolerance,
        load_formats=(load_format, load_format_b),
        **keywords,
    )
    if out.as_json:
        out.emit({"ok": report.equal, **report.to_dict()})
    else:
        show(out, report)
    return 0 if report.equal else 1


def _config_of(settings: tuple[str, ...], own: tuple[str, ...]) -> Any:
    """How one of the two is read.

    Raises:
        OptionError: what is set for it alone is no field of LoadConfig.
    """
    from loadkit.config import LoadConfig

    fields = LoadConfig.options()
    for text in own:
        name = text.partition("=")[0]
        if name not in fields:
            raise unknown_option(name, fields, "--set-a and --set-b")
    return ModelRequest("", settings=(*settings, *own)).keywords(progress=False)["load_config"]


def comparison_options(dtype: str, settings: tuple[str, ...]) -> dict[str, Any]:
    """What a comparison takes of a load's options, as far as they were given."""
    defaults = ModelRequest("").keywords(progress=True)
    keywords = ModelRequest("", dtype=dtype, settings=settings).keywords(progress=False)
    keywords.pop("load_format")
    return {
        key: value
        for key, value in keywords.items()
        if key == "load_config" or (value is not None and value != defaults.get(key))
    }


def show(out: Output, report: Any) -> None:
    """The report for people."""
    for label, side in (("a", report.a), ("b", report.b)):
        size = f"{side.tensors} tensors, {human_bytes(side.nbytes)}"
        out.line(
            f"{label}  {printable(side.source, ascii_only=False)}  ({side.load_format}, {size})"
        )
    out.line(f"names: {report.names}, {printable(report.names_why, 400)}")
    rows = [[name, "only in a", None, None, None, None] for name in report.only_in_a]
    rows += [[name, "only in b", None, None, None, None] for name in report.only_in_b]
    rows += [_row(one) for one in report.different]
    if rows:
        out.line()
        headers = ["tensor", "differs in", "a", "b", "elements", "max abs / rel"]
        out.table(headers, rows[:LISTED], right=["elements"])
        if len(rows) > LISTED:
            out.line(f"... {len(rows)} in all; --json lists every one")
        out.line()
    size = human_bytes(report.bytes_compared)
    within = "" if report.tolerance is None else f", within {report.tolerance:g}"
    verdict = f"equal{within}" if report.equal else f"{len(rows)} difference(s)"
    out.line(f"{verdict}: {report.compared} tensors compared, {size}")


def _row(one: Any) -> list[Any]:
    far = None if one.max_abs is None else f"{one.max_abs:.3g} / {one.max_rel:.3g}"
    return [
        one.tensor,
        one.what,
        f"{one.a_dtype} {list(one.a_shape)}",
        f"{one.b_dtype} {list(one.b_shape)}",
        one.differing if one.what != "shape" else None,
        far,
    ]
