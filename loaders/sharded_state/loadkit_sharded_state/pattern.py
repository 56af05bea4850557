"""How the files of ranks are called: ``model-rank-{rank}-part-{part}.safetensors``.

A pattern is text with two places to fill in. It is never given to ``str.format``.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from loadkit.errors import PathError, ShardedError
from loadkit.file_checks import show
from loadkit.sources.paths import check_name

__all__ = ["DEFAULT_PATTERN", "FilePattern", "Numbers"]

DEFAULT_PATTERN = "model-rank-{rank}-part-{part}.safetensors"

_PLACE = re.compile(r"\{(rank|part)(?::0([1-9])d)?\}")
_SUFFIX = ".safetensors"


class Numbers(NamedTuple):
    """What a file's name says: whose it is, and which of that rank's files."""

    rank: int
    part: int


class FilePattern:
    """A pattern, checked.

    Raises:
        ShardedError: it lacks a place or has one twice, has another one, or is no plain file name
            ending in ``.safetensors``.
    """

    def __init__(self, text: str = DEFAULT_PATTERN) -> None:
        self.text = text
        pieces = _PLACE.split(text)
        literals, places, widths = pieces[0::3], pieces[1::3], pieces[2::3]
        problem = None
        if sorted(places) != ["part", "rank"]:
            problem = "needs {rank} and {part}, each once"
        elif any(char in literal for literal in literals for char in "{}"):
            problem = "has a place that is neither {rank} nor {part}"
        elif not text.endswith(_SUFFIX) or "/" in text:
            problem = f"is no name of a {_SUFFIX} file"
        elif not literals[1]:
            problem = "has nothing between {rank} and {part}"
        self._literals, self._places = literals, places
        self._widths = [int(width or 0) for width in widths]
        if problem is None:
            try:
                check_name(self.name(0, 0))
            except PathError as error:
                problem = f"makes a bad name: {error.message}"
        if problem is not None:
            raise ShardedError(
                f"the pattern {show(text)} {problem}",
                detail={"pattern": text},
                hint=f"such as {DEFAULT_PATTERN}",
            )
        self._regex = re.compile(self._expression())

    def name(self, rank: int, part: int) -> str:
        """The name of a rank's file number ``part``."""
        numbers = {"rank": rank, "part": part}
        filled = [
            f"{numbers[place]:0{width}d}{literal}"
            for place, width, literal in zip(
                self._places, self._widths, self._literals[1:], strict=True
            )
        ]
        return self._literals[0] + "".join(filled)

    def match(self, name: str) -> Numbers | None:
        """Whose file a name is, or None if it is not of this pattern."""
        found = self._regex.fullmatch(name)
        return None if found is None else Numbers(int(found["rank"]), int(found["part"]))

    def _expression(self) -> str:
        parts = [re.escape(self._literals[0])]
        for place, width, literal in zip(
            self._places, self._widths, self._literals[1:], strict=True
        ):
            digits = rf"\d{{{width},7}}" if width else r"0|[1-9]\d{0,6}"
            parts.append(f"(?P<{place}>{digits}){re.escape(literal)}")
        return "".join(parts)
