"""How this package says what is wrong: always the file, and where there is one the byte."""

from __future__ import annotations

from typing import Any

from loadkit.errors import FormatError
from loadkit.file_checks import show

__all__ = ["damaged", "refused"]

_AGAIN = "the file is damaged or incomplete; copy or download it again"


def damaged(
    code: str,
    file: str,
    problem: str,
    *,
    offset: int | None = None,
    tensor: str | None = None,
    **detail: Any,
) -> FormatError:
    """The error of a file that contradicts itself."""
    return refused(code, file, problem, _AGAIN, offset=offset, tensor=tensor, **detail)


def refused(
    code: str,
    file: str,
    problem: str,
    hint: str,
    *,
    offset: int | None = None,
    tensor: str | None = None,
    **detail: Any,
) -> FormatError:
    """The error of a file that says what this reader does not take."""
    where = "" if offset is None else f" (byte {offset})"
    return FormatError(
        f"{show(file)}: {problem}{where}",
        code=code,
        file=file,
        tensor=tensor,
        offset=offset,
        detail=detail or None,
        hint=hint,
    )
