"""``s3://bucket/folder``, ``gs://bucket/folder`` and ``az://container/folder``, or one object.

Credentials, regions and endpoints are found as the clouds' own tools find them: see the page on
remote sources. An endpoint that begins with ``http://`` is taken at its word.
"""

from __future__ import annotations

import importlib.util
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from obstore.store import AzureStore, GCSStore, S3Store

from loadkit.errors import OptionError, PathError, ReadError
from loadkit.file_checks import show
from loadkit.network.answers import Absent, Denied, Pin, Transient, Transport
from loadkit.network.patience import Deadline, Retries
from loadkit.network.remote_file import BLOCK, RemoteFile
from loadkit.sources.base import FileInfo
from loadkit.sources.local import SIDE_FILES
from loadkit_remote.bucket_transport import BucketTransport
from loadkit_remote.gs_emulator import EmulatedBucket, emulator_host
from loadkit_remote.source import FILE_SUFFIXES, LISTED_DEPTH, MAX_LISTED, RemoteSource

__all__ = ["AzureSource", "GSSource", "S3Source"]


class BucketSource(RemoteSource):
    """A folder of a bucket, or one object of it."""

    endpoints: ClassVar[tuple[str, ...]] = ()  # environment variables that may name one

    def make_transport(self, uri: str) -> Transport:
        scheme, _, rest = uri.partition("://")
        bucket, _, key = rest.partition("/")
        if not bucket or not bucket.isprintable() or any(char in bucket for char in "@?#\\ "):
            raise OptionError(
                f"{show(self.uri)} names no bucket", hint=f"write {scheme}://bucket/folder"
            )
        folder, _, last = key.rpartition("/")
        if last.endswith(FILE_SUFFIXES):
            self.single = last
        elif last:
            folder = f"{folder}/{last}".lstrip("/")
        if self.load_config.subfolder and self.single is None:
            folder = f"{folder}/{self.load_config.subfolder}".lstrip("/")
        self._pins: dict[str, Pin] = {}
        return self.transport(bucket, f"{folder}/" if folder else "", f"{scheme}://{bucket}")

    def transport(self, bucket: str, prefix: str, address: str) -> Transport:
        """The way to the objects below a prefix."""
        return BucketTransport(lambda: self.store(bucket), prefix, address)

    @abstractmethod
    def store(self, bucket: str) -> Any:
        """The library's store of a bucket."""

    def look(self, name: str) -> tuple[Pin, bytes]:
        pin = self._pins.get(name)
        if pin is not None:  # listed: its first bytes are asked for when they are wanted
            return pin, b""
        return self._transfers.first(name, BLOCK)

    def find(self) -> list[FileInfo]:
        """The objects of the folder, two folders deep; of a single one, what belongs beside it.

        Raises:
            PathError: there is no such object, or the folder has more than a checkpoint's.
            DownloadError: the server, or the way to it, failed.
        """
        if self.single is None:
            self._pins = self._retried(self._listed)
            return [FileInfo(name, pin.size) for name, pin in self._pins.items()]
        found: dict[str, RemoteFile] = {}
        try:
            found[self.single] = self.remote(self.single)
        except ReadError as error:
            if error.errno is None:
                raise
            raise PathError(error.message, file=self.single, hint=error.hint) from None
        found |= self.side_by_side([self.single, *sorted(SIDE_FILES)])
        return [FileInfo(file.name, file.size) for file in found.values()]

    def _listed(self) -> dict[str, Pin]:
        pins: dict[str, Pin] = {}
        transport: Any = self._transfers.transport
        for seen, (name, pin) in enumerate(transport.listing()):
            if seen >= MAX_LISTED:
                raise self.too_many()
            parts = name.split("/")
            hidden = any(part.startswith(".") for part in parts[:-1])
            if name and parts[-1] and len(parts) <= LISTED_DEPTH + 1 and not hidden:
                pins[name] = pin
        return pins

    def _retried(self, call: Callable[[], dict[str, Pin]]) -> dict[str, Pin]:
        """What a listing gives, tried again like a transfer."""
        deadline = Deadline(self.load_config.network_deadline)
        retries = Retries(f"the listing of {self.uri}", None, deadline)
        refreshed = False
        while True:
            try:
                return call()
            except Transient as error:
                retries.failed(error)
            except Denied as error:
                if refreshed:
                    raise self._transfers.denied("", error, 0) from None
                refreshed = self._transfers.transport.refresh()
                if not refreshed:
                    raise self._transfers.denied("", error, 0) from None
            except Absent:
                raise PathError(
                    f"there is no {show(self.uri)}", hint="see that the bucket's name is right"
                ) from None

    def client(self) -> dict[str, Any]:
        """How the library connects: without retries, and no longer silent than is allowed."""
        config = self.load_config
        plain = any(os.environ.get(name, "").startswith("http://") for name in self.endpoints)
        options: dict[str, Any] = {
            "connect_timeout": timedelta(seconds=config.network_timeout),
            "read_timeout": timedelta(seconds=config.network_timeout),
            "timeout": timedelta(seconds=config.network_deadline + 600),
            "user_agent": "loadkit",
        }
        if plain:
            options["allow_http"] = True
        return {"client_options": options, "retry_config": {"max_retries": 0}}


class S3Source(BucketSource):
    """``s3://``: S3 and what speaks its protocol (``AWS_ENDPOINT_URL``)."""

    endpoints = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

    def store(self, bucket: str) -> Any:
        given: dict[str, Any] = {}
        endpoint = _first(self.endpoints)
        if endpoint:
            given["endpoint"] = endpoint
        provider = _profile()
        if provider is not None:
            given["credential_provider"] = provider
        return S3Store(bucket, **given, **self.client())


class GSSource(BucketSource):
    """``gs://``: Google Cloud Storage; with ``STORAGE_EMULATOR_HOST`` an emulator of it."""

    endpoints = ("GOOGLE_BASE_URL",)

    def transport(self, bucket: str, prefix: str, address: str) -> Transport:
        host = emulator_host()
        if host:
            return EmulatedBucket(host, bucket, prefix, address, self.load_config.network_timeout)
        return super().transport(bucket, prefix, address)

    def store(self, bucket: str) -> Any:
        return GCSStore(bucket, **self.client())


class AzureSource(BucketSource):
    """``az://container/folder``: Azure's blobs; ``AZURE_STORAGE_ACCOUNT_NAME`` says whose."""

    endpoints = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")

    def store(self, bucket: str) -> Any:
        return AzureStore(bucket, **self.client())


def _first(names: Iterable[str]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


def _profile() -> Any:
    """Credentials of a profile in ``~/.aws``, by boto3, where nothing else is said of any."""
    said = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")
    if _first(said) or _first(("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",)):
        return None
    default = Path("~/.aws/credentials").expanduser()
    file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or default)
    if not (file.is_file() or _first(("AWS_PROFILE",))):
        return None
    if importlib.util.find_spec("boto3") is None:
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    return Boto3CredentialProvider()
