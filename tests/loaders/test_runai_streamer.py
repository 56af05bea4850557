"""The Run:ai model streamer: its settings, its sharded sibling, object stores."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import loadkit
from helpers.checkpoints import write_llama
from helpers.extents import expected, extent, held
from helpers.sharded import QUIET, ranks_of, same_state, save_ranks
from loadkit import tables
from loadkit.availability import NEEDS_EXTRA, READY
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    DownloadError,
    NotInstalledError,
    OptionError,
    ReadError,
    ReadFailure,
)
from loadkit.readers.library import BUFFER
from loadkit.readers.ranges import SPAN
from loadkit.sources.base import File
from loadkit.sources.local_file import LocalFile
from loadkit_runai_streamer import availability, streamer
from loadkit_runai_streamer.loader import RunaiModelStreamerLoader
from loadkit_runai_streamer.reader import RunaiReader

pytest.importorskip("runai_model_streamer")


VARIABLE = "RUNAI_STREAMER_CONCURRENCY"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(256)) * 400)
    opened = LocalFile("data.bin", str(path))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def reader(**options: Any) -> RunaiReader:
    return RunaiReader(LoadConfig(reader="runai", reader_options=options))


def test_the_calls_are_those_of_the_installed_library() -> None:
    from runai_model_streamer.libstreamer import libstreamer as calls

    def names(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(calls.runai_start) == []
    assert names(calls.runai_request) == [
        *("streamer", "paths", "num_ranges", "range_offsets", "range_sizes", "range_dsts")
    ]
    assert names(calls.runai_response) == ["streamer", "timeout_ms"]
    assert names(calls.runai_end) == ["streamer"]
    assert names(calls.runai_response_str) == ["response_code"]
    assert calls.SUCCESS_ERROR_CODE == 0


@pytest.mark.parametrize("before", [None, "9"])
def test_settings_are_in_the_environment_for_the_call_alone(
    before: str | None, file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    made = reader(concurrency=3)
    calls: Any = made._streamer._calls
    start, seen = calls.runai_start, []

    def starting() -> Any:
        seen.append(os.environ.get(VARIABLE))
        return start()

    monkeypatch.setattr(calls, "runai_start", starting)
    made.read([extent(file, 0, 100)])
    made.read([extent(file, 7, 100)])
    assert seen == ["3"]  # one streamer for all reads
    assert os.environ.get(VARIABLE) == before
    made.close()


def test_the_loads_number_of_threads_is_the_concurrency_where_none_is_given() -> None:
    assert RunaiReader(LoadConfig(num_threads=5))._streamer._settings == {VARIABLE: "5"}
    assert reader(concurrency=3)._streamer._settings == {VARIABLE: "3"}
    assert reader()._streamer._settings == {}


def test_a_setting_that_the_streamer_refuses_is_a_typed_error(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "many")
    made = reader()
    with pytest.raises(ReadError, match="does not take a request") as caught:
        made.read([extent(file, 3, 100, tensor="w")])
    assert (caught.value.file, caught.value.tensor, caught.value.offset) == ("data.bin", "w", 3)
    assert "RUNAI_STREAMER" in str(caught.value.hint)
    made.close()


@pytest.mark.parametrize(
    ("limit", "bytes_"), [(None, BUFFER), (-1, BUFFER), (0, SPAN), (3 << 20, 3 << 20)]
)
def test_memory_limit_is_the_buffer_beside_the_parameters(limit: int | None, bytes_: int) -> None:
    options = {} if limit is None else {"memory_limit": limit}
    assert reader(**options).buffer_bytes() == bytes_


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"concurency": 8}, "did you mean 'concurrency'"),
        ({"concurrency": "8"}, "concurrency = '8' is a string"),
        ({"concurrency": 0}, "out of range"),
        ({"memory_limit": -2}, "out of range"),
        ({"distributed": True}, "distribute='broadcast'"),
    ],
)
def test_CFG_06_keys_are_vllms_and_checked(
    llama: Path, extra: dict[str, Any], message: str
) -> None:
    for load_format in ("runai_streamer", "runai_streamer_sharded"):
        given = LoadConfig(load_format=load_format, model_loader_extra_config=extra)
        with pytest.raises(OptionError, match=message):
            loadkit.plan(llama, load_config=given)


def test_CFG_06_the_sharded_sibling_takes_the_same_keys_and_the_plain_one_does_not(
    llama: Path, tmp_path: Path
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=2))
    extra = {
        "concurrency": 2,
        "memory_limit": 0,
        "pattern": "model-rank-{rank}-part-{part}.safetensors",
    }
    given = LoadConfig(
        load_format="runai_streamer_sharded",
        model_loader_extra_config=extra,
        use_tqdm_on_load=False,
    )
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        found = loadkit.load(tmp_path, load_config=given, parallel=parallel)
        assert (found.report.reader, found.report.aliased_bytes) == ("runai", 0)
        assert found.report.bytes_read == found.plan.bytes_to_read
        plain = loadkit.load_model(llama, load_config=QUIET, parallel=parallel)
        same_state(found.model, plain)
    alone = LoadConfig(load_format="sharded_state", model_loader_extra_config={"concurrency": 2})
    with pytest.raises(OptionError, match="has no option 'concurrency'"):
        loadkit.plan(tmp_path, load_config=alone, parallel=ParallelConfig(tp_size=2))


def test_the_sharded_sibling_reads_with_another_reader_where_that_is_named(
    llama: Path, tmp_path: Path
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    named = LoadConfig(load_format="runai_streamer_sharded", reader="pread", use_tqdm_on_load=False)
    assert loadkit.load(tmp_path, load_config=named).report.reader == "pread"


def test_without_the_reader_the_sharded_siblings_keys_name_the_pip_line(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_ranks(llama, tmp_path, ranks_of(tp_size=1))
    names = [name for name in tables.readers.names() if name != "runai"]
    monkeypatch.setattr(tables.readers, "names", lambda: names)
    given = LoadConfig(load_format="runai_streamer_sharded", use_tqdm_on_load=False)
    assert loadkit.load(tmp_path, load_config=given).report.reader != "runai"
    with pytest.raises(NotInstalledError, match=r"loadkit\[runai-streamer\]"):
        loadkit.plan(
            tmp_path,
            load_config=LoadConfig(
                load_format="runai_streamer_sharded", model_loader_extra_config={"concurrency": 2}
            ),
        )


def test_what_is_side_by_side_in_a_file_is_so_in_memory(tmp_path: Path) -> None:
    sizes = {"c": 96, "a": 64, "d": 32, "b": 160}
    given = {name: torch.randn(size, 2) for name, size in sizes.items()}
    save_file(given, tmp_path / "model.safetensors")
    module = torch.nn.Module()
    for name, value in given.items():
        module.register_parameter(name, torch.nn.Parameter(torch.empty_like(value, device="meta")))
    loadkit.load_into(module, tmp_path, load_format="runai_streamer", load_config=QUIET)
    found = dict(module.named_parameters())
    for name, value in given.items():
        assert torch.equal(found[name], value)
        assert found[name].untyped_storage().nbytes() == value.nbytes, "a storage of its own"
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        order = file.offset_keys()
    places = [found[name].data_ptr() for name in order]
    assert [b - a for a, b in pairwise(places)] == [given[name].nbytes for name in order[:-1]]


def test_availability_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert availability.state() == READY
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: None)
    assert availability.state() == NEEDS_EXTRA


def test_the_loader_is_the_one_line_of_all_formats() -> None:
    assert "load_model" not in vars(RunaiModelStreamerLoader)


# -- object stores -------------------------------------------------------------------------------


class Elsewhere(File):
    """A file of an object store whose bytes this side reads too, for its errors."""

    def __init__(self, address: str, data: bytes) -> None:
        self.name, self.size, self.address = address.rpartition("/")[2], len(data), address
        self._data = data

    def read(self, offset: int, nbytes: int) -> bytes:
        return self._data[offset : offset + nbytes]

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_object_stores_plugin_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamer, "find_spec", lambda _: None)
    made = reader()
    with pytest.raises(NotInstalledError, match="pip install runai-model-streamer-s3"):
        made.reads_remote(Elsewhere("s3://bucket/key", b""))
    assert not made.reads_remote(Elsewhere("https://host/key", b""))


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """The address of a bucket on a local server."""
    server_module = pytest.importorskip("moto.server")
    boto3 = pytest.importorskip("boto3")
    pytest.importorskip("runai_model_streamer_s3")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    environment = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_ENDPOINT": url,
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="weights")
        yield "s3://weights"
    server.stop()


def put(address: str, data: bytes) -> None:
    import boto3

    name, _, key = address.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    client.put_object(Bucket=name, Key=key, Body=data)


def test_ranges_come_from_s3_straight_into_memory(bucket: str) -> None:
    data = bytes(torch.randint(0, 256, (300_000,), dtype=torch.uint8).tolist())
    put(f"{bucket}/model.safetensors", data)
    file: Any = Elsewhere(f"{bucket}/model.safetensors", data)
    made = reader(concurrency=2)
    assert made.reads_remote(file)
    wanted = [extent(file, 5, 100_000), extent(file, 150_000, 100, 50, 300, 100)]
    made.read(wanted)
    made.close()
    assert [held(one) == expected(data, one) for one in wanted] == [True, True]


def test_a_key_that_is_not_there_is_a_download_error(bucket: str) -> None:
    file: Any = Elsewhere(f"{bucket}/nothing.safetensors", bytes(1000))
    made = reader(concurrency=2)
    with pytest.raises(DownloadError) as caught:
        made.read([extent(file, 5, 100, tensor="w")])
    made.close()
    assert (caught.value.file, caught.value.tensor) == ("nothing.safetensors", "w")
    assert "AWS_ENDPOINT_URL" in str(caught.value.hint)


def test_a_model_streams_from_s3_by_the_streamer(bucket: str, llama: Path) -> None:
    if "s3" not in tables.sources.names():
        pytest.skip("the source of s3:// is not installed")
    for path in llama.iterdir():
        put(f"{bucket}/llama/{path.name}", path.read_bytes())
    given = LoadConfig(load_format="runai_streamer", stream=True, use_tqdm_on_load=False)
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        found = loadkit.load(f"{bucket}/llama", load_config=given, parallel=parallel)
        assert found.report.reader == "runai"
        same_state(found.model, loadkit.load_model(llama, load_config=QUIET, parallel=parallel))


def test_an_object_that_is_written_anew_meanwhile_is_noticed(
    bucket: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "s3" not in tables.sources.names():
        pytest.skip("the source of s3:// is not installed")
    for path in llama.iterdir():
        put(f"{bucket}/moving/{path.name}", path.read_bytes())
    honest = RunaiReader.fetch

    def overtaken(self: RunaiReader, *given: Any) -> None:
        honest(self, *given)
        data = bytearray((llama / "model.safetensors").read_bytes())
        data[-1] ^= 1
        put(f"{bucket}/moving/model.safetensors", bytes(data))

    monkeypatch.setattr(RunaiReader, "fetch", overtaken)
    given = LoadConfig(load_format="runai_streamer", stream=True, use_tqdm_on_load=False)
    with pytest.raises(ReadFailure, match="changed while it was read"):
        loadkit.load(f"{bucket}/moving", load_config=given)
