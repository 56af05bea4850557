"""The remote columns of the format table, each format against a bucket on loopback, yes and no."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import loadkit
from contract.formats import FORMATS, MatrixFormat
from helpers.format_models import Model, check_same, load, plain
from helpers.web_server import WebServer
from loadkit.config import ParallelConfig
from loadkit.errors import OptionError
from loadkit.network import remote_file

each_format = pytest.mark.parametrize("form", FORMATS, ids=repr)
Folder = Callable[[MatrixFormat], Path]


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebServer]:
    root = tmp_path_factory.mktemp("web")
    with WebServer(root) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", server.url)
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        patch.setenv("AWS_REGION", "us-east-1")
        # Of a model as small as this one a block read ahead is most of it.
        patch.setattr(remote_file, "BLOCK", 2048)
        patch.setattr("loadkit_gguf.window._FIRST", 2048)
        yield server


@pytest.fixture
def far(
    bucket: WebServer, in_format: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[MatrixFormat], str]:
    """The address of the model in a format, and a cache of this test's own."""
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))

    def address(form: MatrixFormat) -> str:
        name = f"f{FORMATS.index(form)}"
        place = bucket.folder / "bucket" / name
        if not place.exists():
            shutil.copytree(in_format(form), place)
        del bucket.requests[:]
        own = form.source(place)  # a format may have a server of its own
        return own if isinstance(own, str) else f"s3://bucket/{name}"

    return address


def weights(form: MatrixFormat, bucket: WebServer) -> int:
    """Bytes of the weight files."""
    folder = bucket.folder / "bucket" / f"f{FORMATS.index(form)}"
    return sum(path.stat().st_size for path in folder.rglob("*") if path.suffix != ".json")


def kept(tmp_path: Path) -> int:
    """Bytes that lie on this machine after a load."""
    return sum(p.stat().st_size for p in (tmp_path / "cache").rglob("*") if p.is_file())


@each_format
def test_a_plan_reads_headers_alone_where_the_table_says_so(
    form: MatrixFormat, far: Callable[[MatrixFormat], str], bucket: WebServer
) -> None:
    uri = far(form)
    plan = loadkit.plan(
        uri, dtype="bfloat16", load_config=form.load_config(), **form.load_arguments
    )
    assert plan.ok
    size = weights(form, bucket)
    listings = sum(noted.sent for noted in bucket.requests if "list-type" in noted.query)
    if uri.startswith("s3:"):
        assert plan.bytes_fetched == bucket.sent() - listings
    assert (plan.bytes_fetched < size / 5) == form.remote_plan, (plan.bytes_fetched, size)
    if not form.remote_plan:
        assert plan.bytes_fetched > 0.9 * size


@each_format
def test_a_stream_fills_parameters_where_the_table_says_so(
    form: MatrixFormat,
    far: Callable[[MatrixFormat], str],
    bucket: WebServer,
    tiny: Model,
    tmp_path: Path,
) -> None:
    uri = far(form)
    arguments = {"dtype": "bfloat16", **form.load_arguments}
    if not form.streamed:
        with pytest.raises(OptionError, match="stream"):
            loadkit.load(uri, load_config=form.load_config(stream=True), **arguments)
        assert sum(noted.sent for noted in bucket.requests) < weights(form, bucket) / 5
        result = loadkit.load(uri, load_config=form.load_config(), **arguments)
        check_same(form, result.model, plain(tiny))  # what is fetched first is loaded all the same
        return
    result = loadkit.load(
        uri, load_config=form.load_config(stream=True),
        parallel=ParallelConfig(tp_size=3, tp_rank=1), **arguments,
    )  # fmt: skip
    check_same(form, result.model, plain(tiny, 3, 1))
    report = result.report
    assert report.bytes_read == result.plan.bytes_to_read
    listings = sum(noted.sent for noted in bucket.requests if "list-type" in noted.query)
    assert report.bytes_fetched == bucket.sent() - listings
    assert report.bytes_read <= report.bytes_fetched
    assert (report.bytes_fetched < 0.8 * weights(form, bucket)) == form.tp_slices
    assert kept(tmp_path) == 0


@each_format
def test_a_folder_that_was_fetched_first_is_the_same_model(
    form: MatrixFormat,
    far: Callable[[MatrixFormat], str],
    bucket: WebServer,
    tiny: Model,
    tmp_path: Path,
) -> None:
    if not form.streamed:
        pytest.skip("see above")
    uri = far(form)
    found = loadkit.load(
        uri, dtype="bfloat16", load_config=form.load_config(), **form.load_arguments
    )
    check_same(form, found.model, load(form, bucket.folder / uri.removeprefix("s3://")).model,
               exact=True)  # fmt: skip
    assert kept(tmp_path) > 0.9 * weights(form, bucket)
