"""Tensorizer files behind s3:// and http:// URIs, from real servers on this machine."""

from __future__ import annotations

import http.server
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.tensorizer_files import GOOD, ROWS, Container, plain_file, write_tensors
from loadkit.config import LoadConfig
from loadkit.errors import DownloadError, IntegrityError, LoadkitError, OptionError

SECRET = "a-secret-of-thirty-two-letters!!"
BAD = ["T01", "T03-20", "T05", "T07", "T08", "T09", "T13-17179869184", "T15-3", "T19", "T23-|O8"]
KEYS = {"s3_access_key_id": "AKIATEST", "s3_secret_access_key": SECRET}


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(64, 32))
        self.second = nn.Parameter(torch.zeros(16))


def load(folder: Path, **extra: Any) -> tuple[Pair, Any]:
    module = Pair()
    config = LoadConfig(
        load_format="tensorizer", use_tqdm_on_load=False, model_loader_extra_config=extra
    )
    return module, loadkit.load_into(module, folder, load_config=config)


def check(module: Pair) -> None:
    assert torch.equal(module.first, GOOD["first"])
    assert torch.equal(module.second, GOOD["second"])


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return bytes(plain_file(tmp_path_factory.mktemp("good")).data)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder, and the address that it is served at."""
    folder = tmp_path_factory.mktemp("web")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the library calls curl")


@needs_curl
def test_a_file_behind_http(good: bytes, web: tuple[Path, str], tmp_path: Path) -> None:
    (web[0] / "a.tensors").write_bytes(good)
    module, result = load(tmp_path, tensorizer_uri=f"{web[1]}/a.tensors")
    check(module)
    assert "OPAQUE_LOADER" in {note.code for note in result.plan.notes}


@needs_curl
@pytest.mark.parametrize(
    "name",
    ["T01", "T03-20", "T05", "T07", "T08", "T09", "T13-17179869184", "T15-3", "T19", "T23-|O8"],
)
def test_a_bad_file_behind_http_is_the_same_error(
    name: str, good: bytes, web: tuple[Path, str], tmp_path: Path
) -> None:
    row = next(row for row in ROWS if row.name == name)
    file = Container(good)
    row.spoil(file)
    (web[0] / "bad.tensors").write_bytes(file.data)
    with pytest.raises(LoadkitError) as caught:
        load(tmp_path, tensorizer_uri=f"{web[1]}/bad.tensors")
    found = getattr(caught.value, "problems", None)
    code = f"E_{found[0].code}" if found else caught.value.code
    assert code == row.code or (name == "T01" and code == "E_DOWNLOAD"), caught.value


@needs_curl
def test_an_encrypted_file_behind_http(web: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    write_tensors(web[0] / "secret.tensors", GOOD, bytes(range(32)))
    uri = f"{web[1]}/secret.tensors"
    check(load(tmp_path, tensorizer_uri=uri, encryption_keyfile=str(tmp_path / "key"))[0])
    (tmp_path / "key").write_bytes(bytes(32))
    with pytest.raises(IntegrityError) as caught:
        load(tmp_path, tensorizer_uri=uri, encryption_keyfile=str(tmp_path / "key"))
    assert caught.value.code == "E_DECRYPT"


@needs_curl
def test_a_file_that_is_not_there_says_what_the_server_answered(
    web: tuple[Path, str], tmp_path: Path
) -> None:
    uri = f"{web[1]}/none.tensors?signature=hunter2"
    with pytest.raises(DownloadError) as caught:
        load(tmp_path, tensorizer_uri=uri)
    assert "hunter2" not in repr(caught.value.to_dict())


@needs_curl
def test_several_readers_are_refused_where_there_is_one_stream(
    good: bytes, web: tuple[Path, str], tmp_path: Path
) -> None:
    (web[0] / "a.tensors").write_bytes(good)
    with pytest.raises(OptionError, match="num_readers"):
        load(tmp_path, tensorizer_uri=f"{web[1]}/a.tensors", num_readers=4)


@pytest.fixture(scope="module")
def bucket() -> Iterator[tuple[Any, str]]:
    """A client of a bucket on moto's server, and the server's address."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="AKIATEST",
        aws_secret_access_key=SECRET,
    )
    client.create_bucket(Bucket="weights")
    yield client, url
    server.stop()


@needs_curl
def test_a_file_in_s3(good: bytes, bucket: tuple[Any, str], tmp_path: Path) -> None:
    client, url = bucket
    client.put_object(Bucket="weights", Key="m/a.tensors", Body=good)
    uri = "s3://weights/m/a.tensors"
    check(load(tmp_path, tensorizer_uri=uri, s3_endpoint=url, **KEYS)[0])
    client.put_object(Bucket="weights", Key="m/a.tensors", Body=good[:-1000])
    with pytest.raises(LoadkitError) as caught:
        load(tmp_path, tensorizer_uri=uri, s3_endpoint=url, **KEYS)
    assert caught.value.code == "E_TRUNCATED"


@needs_curl
def test_each_ranks_file_in_s3(bucket: tuple[Any, str], tmp_path: Path) -> None:
    client, url = bucket
    for rank in range(2):
        path = write_tensors(tmp_path / "one.tensors", {"w": torch.full((3,), float(rank))})
        client.put_object(
            Bucket="weights", Key=f"r/model-{rank:02d}.tensors", Body=path.read_bytes()
        )

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(3))

    for rank in range(2):
        module = One()
        config = LoadConfig(
            load_format="tensorizer",
            use_tqdm_on_load=False,
            model_loader_extra_config={
                "tensorizer_uri": "s3://weights/r/model-%02d.tensors", "s3_endpoint": url, **KEYS
            },
        )  # fmt: skip
        parallel = loadkit.ParallelConfig(tp_size=2, tp_rank=rank)
        loadkit.load_into(module, tmp_path, load_config=config, parallel=parallel)
        assert module.w.tolist() == [float(rank)] * 3


@needs_curl
def test_no_error_of_s3_tells_a_secret(bucket: tuple[Any, str], tmp_path: Path) -> None:
    for uri, endpoint in (
        ("s3://weights/none.tensors", bucket[1]),
        ("s3://weights/none.tensors", "http://127.0.0.1:9"),
    ):
        with pytest.raises(DownloadError) as caught:
            load(tmp_path, tensorizer_uri=uri, s3_endpoint=endpoint, **KEYS)
        told = f"{caught.value} {caught.value.to_dict()} {caught.value.__cause__}"
        assert SECRET not in told
        assert "Signature" not in told
