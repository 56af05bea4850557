"""Names of floating dtypes, as configs and people write them. No torch here."""

from __future__ import annotations

from loadkit.errors import LoadkitError, OptionError
from loadkit.text import nearest, printable

__all__ = ["FLOAT_DTYPES", "dtype_name", "known_dtype"]

# torch attribute names of what a model's parameters can be declared in
FLOAT_DTYPES = (
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
)
_ALIASES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
    "double": "float64",
    "fp64": "float64",
    "f64": "float64",
}


def known_dtype(name: object) -> str | None:
    """The torch name of a dtype in any of its spellings, or None."""
    if not isinstance(name, str):
        return None
    word = name.strip().lower().removeprefix("torch.")
    word = _ALIASES.get(word, word)
    return word if word in FLOAT_DTYPES else None


def dtype_name(
    name: object,
    *,
    what: str,
    allow_auto: bool = False,
    error: type[LoadkitError] = OptionError,
    file: str | None = None,
) -> str:
    """The torch name of a dtype: ``half``, ``bf16``, ``torch.float32``, ...

    Args:
        name: any spelling.
        what: what it is the value of, for the error.
        allow_auto: let "auto" pass.
        error: the class to raise.
        file: the file it stands in.
    """
    if allow_auto and name == "auto":
        return "auto"
    found = known_dtype(name)
    if found is not None:
        return found
    accepted = [*(["auto"] if allow_auto else []), *FLOAT_DTYPES, *_ALIASES]
    near = nearest(name, accepted, 1) if isinstance(name, str) else []
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise error(
        f"{what} is {printable(repr(name), 80)}; accepted: {', '.join(accepted)}{hint}",
        file=file,
        detail={"value": printable(str(name)), "accepted": accepted, "nearest": near},
    )
