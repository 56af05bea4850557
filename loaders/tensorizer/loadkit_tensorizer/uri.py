"""What ``tensorizer_uri`` names: a file, or one of each rank, and where."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from loadkit.errors import OptionError
from loadkit.file_checks import show_path

__all__ = ["FileName", "parse_uri"]

_PLACE = re.compile(r"%0([1-9])d")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_STREAMED = frozenset({"s3", "http", "https"})


@dataclass(frozen=True)
class FileName:
    """A name with a rank's place in it, or without.

    Attributes:
        text: as it was given, without ``file://``.
        scheme: ``s3``, ``http`` or ``https``; empty for files of this machine or of the source.
        width: least digits of a rank's number; 0: the file is of the whole model.
    """

    text: str
    scheme: str = ""
    width: int = 0

    @property
    def per_rank(self) -> bool:
        """Whether each rank has a file of its own."""
        return self.width > 0

    @property
    def folder(self) -> str:
        """The folder of a path; empty for a name inside the source."""
        return "" if self.scheme else os.path.dirname(self.text)  # noqa: PTH120 - a text

    @property
    def name(self) -> str:
        """The last part of a path."""
        return self.text if self.scheme else Path(self.text).name

    def of(self, rank: int) -> str:
        """The whole text for one rank."""
        return _PLACE.sub(lambda found: f"{rank:0{found[1]}d}", self.text)

    def rank_of(self, name: str) -> int | None:
        """Whose a file of the folder is, by its name; None: it is not of this pattern."""
        if not self.per_rank:
            return None
        head, tail = _PLACE.split(self.name)[0::2]
        digits = rf"\d{{{self.width}}}|[1-9]\d{{{self.width},9}}"
        found = re.fullmatch(f"{re.escape(head)}({digits}){re.escape(tail)}", name)
        return None if found is None else int(found[1])


def parse_uri(text: str) -> FileName:
    """Check what was given as ``tensorizer_uri``.

    Raises:
        OptionError: another scheme, or a ``%`` that is no rank's place.
    """
    found = _SCHEME.match(text)
    scheme = found[1].lower() if found else ""
    if scheme == "file":
        text, scheme = text[len("file://") :], ""
    elif scheme and scheme not in _STREAMED:
        raise _refused(text, f"has the scheme {scheme!r}; accepted: a path, file, s3, http, https")
    places = _PLACE.findall(text)
    odd = "%" in _PLACE.sub("", text)
    if len(places) > 1 or (odd and (places or not scheme)):
        raise _refused(text, "may have one place for a rank's number, such as %03d, and no other %")
    if not scheme:
        text = os.path.expanduser(text)  # noqa: PTH111 - a text
        if not Path(text).name or (places and not _PLACE.search(Path(text).name)):
            raise _refused(text, "has to end with a file's name, and a rank's place is in that")
    return FileName(text, scheme, int(places[0]) if places else 0)


def _refused(text: str, said: str) -> OptionError:
    shown = show_path(text.partition("?")[0])
    return OptionError(f"tensorizer_uri {shown} {said}", detail={"option": "tensorizer_uri"})
