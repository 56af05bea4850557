"""The options that commands share, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from loadkit.cli.output import Output

if TYPE_CHECKING:
    from loadkit.config import ParallelConfig

__all__ = ["ModelRequest", "model_options", "output_options"]

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelRequest:
    """A model as the command line asks for it."""

    source: str
    load_format: str = "auto"
    dtype: str = "auto"
    device: str | None = None
    tp: int = 1
    pp: int = 1
    ep: int = 1
    rank: int | None = None
    quantization: str | None = None
    model_impl: str = "auto"
    trust_remote_code: bool = False
    strict: bool = True
    settings: tuple[str, ...] = ()

    def ranks(self) -> list[ParallelConfig]:
        """The ranks asked for: ``--rank``, else every rank of pp x tp, in order.

        Raises:
            OptionError: sizes that do not fit, or a rank outside the world.
        """
        from loadkit.config import ParallelConfig

        world = range(self.pp * self.tp) if self.rank is None else [self.rank]
        return [
            ParallelConfig.for_rank(rank, tp_size=self.tp, pp_size=self.pp, ep_size=self.ep)
            for rank in world
        ]

    def keywords(self, *, progress: bool) -> dict[str, Any]:
        """The keyword arguments of ``loadkit.plan`` and ``loadkit.load``, ``parallel`` excepted.

        Args:
            progress: whether somebody looks; without, a bar is shown only if a setting asks.

        Raises:
            OptionError: a setting is unknown or wrong, or differs from its option.
        """
        from loadkit.cli.settings import agreed, read_settings, without_progress

        load, model, given = read_settings(self.settings)
        trust = bool(model.pop("trust_remote_code", False)) or load.trust_remote_code
        if not progress and "use_tqdm_on_load" not in given:
            load = without_progress(load)
        return {
            "load_format": agreed("load_format", self.load_format, "auto", load.load_format),
            "dtype": agreed("dtype", self.dtype, "auto", model.pop("dtype", None)),
            "device": agreed("device", self.device, None, load.device),
            "load_config": load,
            "quantization": agreed(
                "quantization", self.quantization, None, model.pop("quantization", None)
            ),
            "model_impl": agreed(
                "model_impl", self.model_impl, "auto", model.pop("model_impl", None)
            ),
            "trust_remote_code": self.trust_remote_code or trust,
            "strict": self.strict,
            **model,
        }


def output_options(command: Command) -> Command:
    """``--json`` and ``--debug``; they set the run's ``Output``."""
    return _decorate(command, _OUTPUT)


def model_options(command: Command) -> Command:
    """SOURCE and every common option, given to the command as one ``request``."""

    @wraps(command)
    def with_request(**values: Any) -> Any:
        fields = {name: values.pop(name) for name in ModelRequest.__dataclass_fields__}
        return command(request=ModelRequest(**fields), **values)

    return _decorate(cast(Command, with_request), [_SOURCE, *_MODEL, *_OUTPUT])


def _decorate(command: Command, parts: Sequence[Callable[[Any], Any]]) -> Command:
    """Apply decorators so that --help lists them in the order given."""
    for part in reversed(parts):
        command = part(command)
    return command


def _set(attribute: str) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_it(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        setattr(ctx.ensure_object(Output), attribute, value)

    return set_it


_option = click.option
_size = click.IntRange(min=1)
_SOURCE = click.argument("source")
_OUTPUT = [
    _option("--json", is_flag=True, expose_value=False, callback=_set("as_json"),
            help="Write one JSON object to stdout."),
    _option("--debug", is_flag=True, expose_value=False, callback=_set("debug"),
            help="Show logs, and errors with their traceback."),
]  # fmt: skip
_MODEL = [
    _option("--tp", type=_size, default=1, metavar="N", help="Tensor parallel size."),
    _option("--pp", type=_size, default=1, metavar="N", help="Pipeline parallel size."),
    _option("--ep", type=_size, default=1, metavar="N", help="Expert parallel size."),
    _option("--rank", type=click.IntRange(min=0), metavar="R", help="This rank only."),
    _option("--load-format", default="auto", metavar="F", help="See 'loadkit formats'."),
    _option("--dtype", default="auto", metavar="D", help="Parameters' dtype."),
    _option("--device", metavar="D", help="Parameters' device."),
    _option("--quantization", metavar="M", help="Quantisation method."),
    _option("--model-impl", default="auto", metavar="I", help="Which implementation of a model."),
    _option("--trust-remote-code", is_flag=True, help="Allow code that comes with a model."),
    _option("--strict/--no-strict", default=True,
            help="Refuse tensors without a place, and parameters without a tensor."),
    _option("--set", "settings", multiple=True, metavar="KEY=VALUE",
            help="A field of LoadConfig or ModelConfig; may be repeated."),
]  # fmt: skip
