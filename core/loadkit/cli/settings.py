"""``--set key=value`` texts, and the options that have fields of the same name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from loadkit.errors import OptionError
from loadkit.text import printable

if TYPE_CHECKING:
    from loadkit.config import LoadConfig

__all__ = ["agreed", "read_settings", "without_progress"]


def read_settings(texts: Iterable[str]) -> tuple[LoadConfig, dict[str, Any], set[str]]:
    """The LoadConfig, the options of ModelConfig, and the keys that were given.

    Raises:
        OptionError: no ``=``, a key twice, no such field, or no value of its type.
    """
    from loadkit.config import parse_settings

    given: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise OptionError(f"--set takes key=value, and was given '{printable(text)}'")
        if key in given:
            raise OptionError(f"--set gives '{printable(key)}' twice")
        given[key] = value
    return *parse_settings(given), set(given)


def agreed(name: str, option: Any, default: Any, setting: Any) -> Any:
    """The value of something that an option and ``--set`` can both say.

    Args:
        name: its name, for the error.
        option: what the option says; ``default`` where it was not given.
        default: what the option says when it is not given.
        setting: what ``--set`` says; None or ``default`` where it says nothing.

    Raises:
        OptionError: both were given, and differ.
    """
    if setting is None or setting in (default, option):
        return option
    if option == default:
        return setting
    flag = name.replace("_", "-")
    raise OptionError(
        f"--{flag} says {printable(option)} and --set {name} says {printable(setting)}",
        hint=f"give one of them; --{flag} is enough",
    )


def without_progress(config: LoadConfig) -> LoadConfig:
    """The same, with no progress bar."""
    return replace(config, use_tqdm_on_load=False)
