"""The three clouds' servers on loopback: moto for S3, Azurite, and gcp-storage-emulator.

Each is started once for a session, as a process or a thread, and says how it is reached by the
environment variables that the clouds' own tools read.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["AZURITE", "azurite", "free_port", "gcs_emulator", "moto_s3", "upload"]

ROOT = Path(__file__).resolve().parent.parent.parent
AZURITE = ROOT / ".cache/azurite/node_modules/.bin/azurite-blob"  # scripts/get_azurite.sh
# Azurite's published account, the same on every machine.
_ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return int(unused.getsockname()[1])


@contextmanager
def moto_s3() -> Iterator[dict[str, str]]:
    """moto's S3 in a thread; gives the variables that lead to it."""
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.stop()


@contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """Azurite's blobs as a process."""
    port = free_port()
    child = subprocess.Popen(
        [
            AZURITE,
            "--silent",
            "--skipApiVersionCheck",
            "--blobPort",
            str(port),
            "--location",
            folder,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, child)
        yield {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{_ACCOUNT}",
        }
    finally:
        child.kill()  # asked politely, it waits for connections that are kept open
        child.wait()


@contextmanager
def gcs_emulator(folder: Path) -> Iterator[dict[str, str]]:
    """gcp-storage-emulator in a thread."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, data_dir=str(folder))
    server.start()
    try:
        yield {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}"}
    finally:
        server.stop()


def why_not(cloud: str) -> str:
    """Why a cloud's server cannot be had here; empty if it can."""
    if cloud == "az":
        return "" if AZURITE.exists() and shutil.which("node") else "run scripts/get_azurite.sh"
    module = {"s3": "moto", "gs": "gcp_storage_emulator"}[cloud]
    return "" if find_spec(module) else f"{module} is not installed"


def upload(
    cloud: str, variables: Mapping[str, str], bucket: str, files: Mapping[str, Path]
) -> None:
    """Make a bucket with these files in it: key to path."""
    import obstore
    from obstore.store import AzureStore, S3Store

    plain: dict[str, Any] = {"client_options": {"allow_http": True}}
    if cloud == "gs":
        host = variables["STORAGE_EMULATOR_HOST"]
        _post(f"{host}/storage/v1/b?project=p", f'{{"name": "{bucket}"}}'.encode(), "json")
        for key, path in files.items():
            url = f"{host}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={key}"
            _post(url, path.read_bytes(), "octet-stream")
        return
    if cloud == "s3":
        endpoint = variables["AWS_ENDPOINT_URL"]
        request = urllib.request.Request(f"{endpoint}/{bucket}", method="PUT")
        with urllib.request.urlopen(request):
            pass
        store = S3Store(
            bucket, endpoint=endpoint, access_key_id="a", secret_access_key="b", **plain
        )
    else:
        store = AzureStore(
            bucket,
            account_name=_ACCOUNT,
            account_key=_KEY,
            endpoint=variables["AZURE_STORAGE_ENDPOINT"],
            **plain,
        )
        _make_container(variables, bucket)
    for key, path in files.items():
        obstore.put(store, key, path.read_bytes())


def _make_container(variables: Mapping[str, str], name: str) -> None:
    """Azure's store has no call for it: one request, signed with the account's key."""
    import base64
    import hashlib
    import hmac
    from email.utils import formatdate

    date, version = formatdate(usegmt=True), "2021-12-02"
    resource = f"/{_ACCOUNT}/{_ACCOUNT}/{name}\nrestype:container"
    text = f"PUT\n\n\n\n\n\n\n\n\n\n\n\nx-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    digest = hmac.new(base64.b64decode(_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date,
        "x-ms-version": version,
        "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}",
    }
    url = f"{variables['AZURE_STORAGE_ENDPOINT']}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)):
        pass


def _post(url: str, body: bytes, kind: str) -> None:
    headers = {"Content-Type": f"application/{kind}"}
    with urllib.request.urlopen(urllib.request.Request(url, data=body, headers=headers)):
        pass


def _wait_for(port: int, child: subprocess.Popen[bytes], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while child.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {child.poll()}")
