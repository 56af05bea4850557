"""The files of a repository over HTTP: its source says where they are and what refusals mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadkit.file_checks import show
from loadkit.network.http_transport import HttpTransport

if TYPE_CHECKING:
    from loadkit.network.http_client import HttpClient, Reply
    from loadkit_hub.repository import Repository

__all__ = ["HubTransport"]


class HubTransport(HttpTransport):
    """Files of a repository by their names relative to its root."""

    def __init__(self, client: HttpClient, repository: Repository) -> None:
        super().__init__(client)
        self._repository = repository

    def url_of(self, name: str) -> str:
        return self._repository.url_of(name)

    def check(self, name: str, reply: Reply) -> None:
        self._repository.check(name, reply)

    def refusal(self, name: str, reply: Reply, start: int) -> Exception:
        return self._repository.refused(reply, name)

    def shown(self, name: str) -> str:
        return f"{show(name)} of {self._repository.address.repo}"
