"""``mx://host:port/org/name[@revision][/folder]``, and names of models without a server."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from loadkit.errors import OptionError
from loadkit.file_checks import show_path
from loadkit.sources.paths import check_name

__all__ = ["SCHEME", "Address", "checked_server", "is_repo", "parse_address", "server_of"]

SCHEME = "mx://"
DEFAULT_SERVER = "localhost:8001"  # the package's own
SERVER_VARIABLES = ("MODEL_EXPRESS_URL", "MX_SERVER_ADDRESS")  # the package's, in its order
_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
_MODEL = rf"(?P<model>{_PART}/{_PART})(?:@(?P<revision>[\w][\w.+-]{{0,249}}))?(?:/(?P<path>.*))?"
_ADDRESS = re.compile(rf"{SCHEME}(?P<server>[^/@]*)/{_MODEL}", re.ASCII | re.IGNORECASE)
_REPO = re.compile(rf"(?:hf://)?{_MODEL}", re.ASCII)
_SERVER = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", re.ASCII)


@dataclass(frozen=True)
class Address:
    """A model on a server.

    Attributes:
        server: ``host:port``; "" where none is named.
        model: its name there.
        revision: branch, tag or commit; None: the server's own.
        path: a folder of it; "" for all.
    """

    server: str
    model: str
    revision: str | None = None
    path: str = ""

    def shown(self) -> str:
        """As a URI."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{SCHEME}{self.server}/{self.model}{revision}" + (f"/{self.path}" * bool(self.path))


def is_repo(text: str) -> bool:
    """Whether a source is a repository's name, and no path of this machine."""
    if text.startswith("hf://"):
        return True
    found = _REPO.fullmatch(text)
    return bool(found and not os.path.lexists(text) and not os.path.lexists(text.split("/")[0]))


def parse_address(text: str, revision: str | None = None, subfolder: str | None = None) -> Address:
    """Read an address, or a repository's name.

    Args:
        text: what the user gave.
        revision: ``LoadConfig.revision``.
        subfolder: ``LoadConfig.subfolder``.

    Raises:
        OptionError: it is neither, or names another revision than ``revision``.
        PathError: its folder leads out of the repository.
    """
    pattern = _ADDRESS if text.lower().startswith(SCHEME) else _REPO
    found = pattern.fullmatch(text.rstrip("/"))
    if found is None or ".." in found["model"]:
        raise OptionError(
            f"{show_path(text)} is no model of a ModelExpress server; accepted: "
            f"{SCHEME}host:port/org/name[@revision][/folder]",
            detail={"source": text},
        )
    named = found["revision"]
    if named and revision and named != revision:
        raise OptionError(
            f"{show_path(text)} names revision {show_path(named)} and LoadConfig.revision "
            f"{show_path(revision)}",
            hint="leave out one of the two",
        )
    parts = [part for part in (found["path"], subfolder) if part]
    path = check_name("/".join(parts)) if parts else ""
    made = Address(found.groupdict().get("server") or "", found["model"], named or revision, path)
    return replace(made, server=checked_server(made.server)) if made.server else made


def server_of(given: str | None, named: str = "") -> str:
    """The server that a load asks: the one it names, else as the package's variables say.

    Args:
        given: the option ``server``.
        named: the one of a ``mx://`` address.

    Raises:
        OptionError: two different ones, or what is no ``host:port``.
    """
    option = checked_server(given) if given else ""
    if option and named and option != named:
        raise OptionError(
            f"the source is on {named} and the option server is {option}",
            detail={"option": "server"},
            hint="leave out one of the two",
        )
    if option or named:
        return option or named
    said = next((found for name in SERVER_VARIABLES if (found := os.environ.get(name))), None)
    return checked_server(said or DEFAULT_SERVER)


def checked_server(text: str) -> str:
    """``host:port``; ``http://`` before it is left out, as the package does.

    Raises:
        OptionError: it is none, or says ``https``: the package's client has no TLS.
    """
    plain = text.removeprefix("http://").rstrip("/")
    if plain.startswith("https://"):
        raise OptionError(
            f"{show_path(text)}: the client of modelexpress speaks without TLS and would say so to "
            "nobody",
            detail={"option": "server"},
            hint="name host:port, in a network that you trust",
        )
    found = _SERVER.fullmatch(plain)
    if found is None or not 0 < int(found[1]) <= 65_535:
        raise OptionError(
            f"{show_path(text)} is no address of a server; accepted: host:port",
            detail={"option": "server"},
        )
    return plain
