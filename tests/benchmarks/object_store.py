"""A checkpoint in an S3 bucket of this machine, into memory: the streamer, obstore, and loadkit.

The server is moto, a process of its own that is slow and takes turns: what counts is the CPU of
this side. Each run starts it and puts the files there before anything is measured.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.generate import TOY, with_architecture, written
from benchmarks.harness import Variant

__all__ = ["variants"]

Go = Callable[[], Any]
BUCKET = "weights"


def _serve(folders: list[Path]) -> str:
    """The folders in a bucket, each under its name; the bucket's address."""
    from helpers.clouds import free_port, upload

    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    atexit.register(server.kill)
    url = f"http://127.0.0.1:{port}"
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_ENDPOINT": url,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "RUNAI_STREAMER_S3_REQUEST_TIMEOUT_MS": "60000",  # of the server's turns; else 1 s
    }
    for name in ("AWS_PROFILE", "http_proxy", "HTTP_PROXY"):
        os.environ.pop(name, None)
    _wait_for(url)
    files = {f"{folder.name}/{path.name}": path for folder in folders for path in folder.iterdir()}
    upload("s3", os.environ, BUCKET, files)
    return f"s3://{BUCKET}"


def _wait_for(url: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def streamer(folder: str) -> Go:
    """The Run:ai model streamer; the tensors are kept, so they own their memory."""
    library: Any = importlib.import_module("runai_model_streamer")
    toy, real = written(TOY), Path(folder)
    bucket = _serve([toy, real])

    def load(where: Path) -> list[torch.Tensor]:
        names = sorted(path.name for path in where.glob("*.safetensors"))
        with library.SafetensorsStreamer() as stream:
            stream.stream_files([f"{bucket}/{where.name}/{n}" for n in names], device="cpu",
                                owned=True)  # fmt: skip
            return [tensor for _, tensor in stream.get_tensors()]

    load(toy)
    return lambda: load(real)


def obstore(folder: str) -> Go:
    """Whole objects by obstore, one after the other: as little as a client can do."""
    library: Any = importlib.import_module("obstore")
    stores: Any = importlib.import_module("obstore.store")
    real = Path(folder)
    _serve([real])
    plain = {"client_options": {"allow_http": True}}
    store = stores.S3Store(BUCKET, endpoint=os.environ["AWS_ENDPOINT_URL"], **plain)

    def go() -> list[torch.Tensor]:
        found = []
        for path in sorted(real.glob("*.safetensors")):
            data = library.get(store, f"{real.name}/{path.name}").bytes()
            found.append(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return found

    return go


def loadkit(folder: str, load_format: str = "safetensors") -> Go:
    """``loadkit.load`` of an ``s3://`` address, streamed into parameters without a local copy."""
    package: Any = importlib.import_module("loadkit")
    from benchmarks.unfused import UnfusedLlama
    from loadkit.model_registry import ModelRegistry

    name = UnfusedLlama.__name__
    ModelRegistry.register_model(name, UnfusedLlama)
    toy, real = with_architecture(written(TOY), name), with_architecture(Path(folder), name)
    bucket = _serve([toy, real])
    config = package.LoadConfig(load_format=load_format, stream=True, use_tqdm_on_load=False)
    package.load(f"{bucket}/{toy.name}", load_config=config)

    def go() -> Any:
        result = package.load(f"{bucket}/{real.name}", load_config=config)
        return result.model, {"fetched_gib": result.report.bytes_fetched / (1 << 30)}

    return go


def variants(folder: Path) -> list[Variant]:
    """The least, the library, and loadkit with it and without."""
    at = {"folder": os.fspath(folder)}
    needs = ("moto", "obstore")
    runai = (*needs, "runai_model_streamer", "runai_model_streamer_s3")
    return [
        Variant("obstore, whole objects", "object_store:obstore", at, needs),
        Variant("runai streamer", "object_store:streamer", at, runai),
        Variant("loadkit, runai_streamer", "object_store:loadkit",
                {**at, "load_format": "runai_streamer"}, runai),
        Variant("loadkit", "object_store:loadkit", at, needs),
    ]  # fmt: skip
