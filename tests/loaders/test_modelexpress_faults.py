"""What a ModelExpress server, or the way to it, can do wrong: typed errors, nothing half kept."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from modelexpress import model_pb2

import loadkit
from helpers.checkpoints import write_llama
from helpers.digests import write_manifest
from helpers.model_express import Hub, model_express
from loadkit.config import LoadConfig
from loadkit.errors import (
    ChangedError,
    DownloadError,
    FormatError,
    IntegrityError,
    LoadkitError,
    PathError,
    WriteError,
)
from loadkit_modelexpress import calls
from loadkit_modelexpress.cache import _locked

MODEL = "org/model"
WEIGHTS = "model.safetensors"
Status = grpc.StatusCode
Pieces = Iterator[Any]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "FIRST_WAIT", 0.002)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_llama(tmp_path / "model", hidden=64, ffn=128, vocab=256)
    with model_express() as made:
        made.models[MODEL] = tmp_path / "model"
        yield made


def config(hub: Hub, folder: Path, /, **changes: Any) -> LoadConfig:
    options = {"server": hub.address, "chunk_size": 4096, **changes.pop("options", {})}
    return LoadConfig(
        load_format="modelexpress", cache_dir=str(folder / "cache"),
        model_loader_extra_config=options, use_tqdm_on_load=False, **changes,
    )  # fmt: skip


def refused(hub: Hub, folder: Path, /, **changes: Any) -> LoadkitError:
    """The error of a load; nothing of what it left can be taken for a file."""
    with pytest.raises(LoadkitError) as caught:
        loadkit.load(MODEL, load_config=config(hub, folder, **changes))
    left = [path.name for path in (folder / "cache").rglob("*") if path.is_file()]
    sizes = {path.name: path.stat().st_size for path in hub.models.get(MODEL, folder).rglob("*")}
    for name in left:
        assert not name.startswith(".modelexpress-"), f"{name} was left behind"
        whole = (folder / "cache").rglob(name)
        assert name.startswith(".") or all(path.stat().st_size == sizes[name] for path in whole)
    assert caught.value.hint or caught.value.code == "E_PATH"
    return caught.value


def works(hub: Hub, folder: Path, /, **changes: Any) -> None:
    found = loadkit.load_model(MODEL, load_config=config(hub, folder, **changes))
    plain = dict(loadkit.load_model(hub.models[MODEL]).named_parameters())
    assert all(torch.equal(param, plain[name]) for name, param in found.named_parameters())


def at_weights(change: Callable[[Pieces], Pieces]) -> Callable[[str, Pieces], Pieces]:
    """A change of the pieces of the weights, and of no other file."""
    return lambda name, pieces: change(pieces) if name == WEIGHTS else pieces


def nth(number: int, change: Callable[[Any], Any]) -> Callable[[str, Pieces], Pieces]:
    """One piece of the weights, changed."""

    def pieces_of(pieces: Pieces) -> Pieces:
        for at, piece in enumerate(pieces):
            if at == number:
                change(piece)
            yield piece

    return at_weights(pieces_of)


# -- calls that fail ------------------------------------------------------------------------------


def test_a_server_that_is_down_is_named(hub: Hub, tmp_path: Path) -> None:
    error = refused(hub, tmp_path, options={"server": "127.0.0.1:1"})
    assert isinstance(error, DownloadError)
    assert (error.code, error.exit_code) == ("E_DOWNLOAD", 3)
    assert "127.0.0.1:1" in error.message
    assert error.detail["unreached"]
    assert error.detail["attempts"] == calls.MOST


def test_a_model_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    hub.models["org/other"] = hub.models.pop(MODEL)
    error = refused(hub, tmp_path)
    assert isinstance(error, PathError)
    assert MODEL in error.message


@pytest.mark.parametrize("call", ["ensure", "list", "stream"])
def test_unavailable_twice_and_then_well(hub: Hub, tmp_path: Path, call: str) -> None:
    hub.fails[call] = [Status.UNAVAILABLE, Status.UNAVAILABLE]
    works(hub, tmp_path)
    assert not hub.fails[call]


@pytest.mark.parametrize("call", ["ensure", "list", "stream"])
def test_unavailable_for_good(hub: Hub, tmp_path: Path, call: str) -> None:
    hub.fails[call] = [Status.UNAVAILABLE] * 50
    assert isinstance(refused(hub, tmp_path), DownloadError)
    assert hub.asked[call] == calls.MOST


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.UNAUTHENTICATED, "E_AUTH"),
        (Status.PERMISSION_DENIED, "E_AUTH"),
        (Status.UNIMPLEMENTED, "E_DOWNLOAD"),
        (Status.INTERNAL, "E_DOWNLOAD"),
        (Status.DEADLINE_EXCEEDED, "E_TIMEOUT"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
@pytest.mark.parametrize("call", ["ensure", "list", "stream"])
def test_a_refusal_is_told_at_once(
    hub: Hub, tmp_path: Path, call: str, status: Any, code: str
) -> None:
    hub.fails[call] = [status] * 50
    assert refused(hub, tmp_path).code == code
    assert hub.asked[call] == 1


def test_a_download_that_the_server_cannot_make(hub: Hub, tmp_path: Path) -> None:
    hub.ensure = lambda request: iter(
        [model_pb2.ModelStatusUpdate(status=model_pb2.ERROR, message="no\x1b[31m token")]
    )
    error = refused(hub, tmp_path)
    assert "no" in error.message
    assert "\x1b" not in error.message
    hub.ensure = lambda request: iter([])
    assert "ended without a word" in refused(hub, tmp_path).message


def test_a_revision_that_the_server_does_not_confirm(hub: Hub, tmp_path: Path) -> None:
    hub.names_commit = False
    assert "does not say which commit" in refused(hub, tmp_path, revision="main").message
    hub.names_commit = True
    assert "says" in refused(hub, tmp_path, revision="f" * 40).message


# -- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["list", "stream"])
def test_a_server_that_says_nothing_is_given_up(hub: Hub, tmp_path: Path, call: str) -> None:
    def stall(pieces: Pieces) -> Pieces:
        yield next(pieces)
        hub.ended.wait(30)

    def wait(answer: Any) -> Any:
        hub.ended.wait(30)
        return answer

    if call == "list":
        hub.listing = wait
    else:
        hub.chunks = at_weights(stall)
    start = time.monotonic()
    error = refused(hub, tmp_path, network_timeout=0.3, network_deadline=1.0)
    assert error.code == "E_TIMEOUT"
    assert time.monotonic() - start < 5
    hub.ended.set()


def test_a_download_that_takes_too_long_is_given_up(hub: Hub, tmp_path: Path) -> None:
    def slow(request: Any) -> Iterator[Any]:
        yield model_pb2.ModelStatusUpdate(status=model_pb2.DOWNLOADING)
        hub.ended.wait(30)

    hub.ensure = slow
    error = refused(hub, tmp_path, options={"download_timeout": 0.3})
    hub.ended.set()
    assert error.code == "E_TIMEOUT"
    assert error.detail["download_timeout"] == 0.3  # not how long the net may be silent
    assert "download_timeout" in str(error.hint) and "network" not in str(error.hint)


def test_what_comes_slowly_but_comes_is_waited_for(hub: Hub, tmp_path: Path) -> None:
    def slowly(pieces: Pieces) -> Pieces:
        for piece in pieces:
            time.sleep(0.01)
            yield piece

    hub.chunks = at_weights(slowly)
    works(hub, tmp_path, network_timeout=2.0, network_deadline=0.5)


# -- files that do not come right -----------------------------------------------------------------


def test_a_stream_that_is_cut_once_is_begun_again(hub: Hub, tmp_path: Path) -> None:
    def cut(pieces: Pieces) -> Pieces:
        for at, piece in enumerate(pieces):
            if hub.streamed[WEIGHTS] == 2 and at == 3:
                return
            yield piece

    hub.chunks = at_weights(cut)  # the first stream is the header's
    works(hub, tmp_path)
    assert hub.streamed[WEIGHTS] == 3


def test_a_stream_that_is_always_cut(hub: Hub, tmp_path: Path) -> None:
    hub.chunks = at_weights(lambda pieces: (next(pieces) for _ in range(2)))
    error = refused(hub, tmp_path, options={"chunk_size": 40_000})
    assert isinstance(error, DownloadError)
    assert (error.file, error.offset) == (WEIGHTS, 80_000)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda p: setattr(p, "offset", p.offset + 1), "a piece of byte", id="offset"),
        pytest.param(lambda p: setattr(p, "total_size", 7), "says now that it has", id="size"),
        pytest.param(lambda p: setattr(p, "data", p.data[:-1]), "a piece of byte", id="short"),
        pytest.param(lambda p: setattr(p, "data", p.data * 999), "its list says", id="too much"),
        pytest.param(lambda p: setattr(p, "is_last_chunk", True), "the end", id="early end"),
        pytest.param(lambda p: setattr(p, "is_last_file", True), "within one", id="early last"),
        pytest.param(
            lambda p: setattr(p, "relative_path", "../../evil"), "not asked for", id="another file"
        ),
    ],
)  # fmt: skip
def test_pieces_that_do_not_make_up_the_file(
    hub: Hub, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    hub.chunks = nth(20, change)
    error = refused(hub, tmp_path)
    assert isinstance(error, DownloadError)
    assert said in error.message
    assert error.file == WEIGHTS
    assert not list(tmp_path.rglob("evil"))


def test_another_commit_in_the_middle(hub: Hub, tmp_path: Path) -> None:
    hub.chunks = nth(20, lambda piece: setattr(piece, "commit_hash", "e" * 40))
    assert isinstance(refused(hub, tmp_path), ChangedError)
    hub.chunks = nth(0, lambda piece: setattr(piece, "commit_hash", "e" * 40))
    assert isinstance(refused(hub, tmp_path), ChangedError)
    hub.chunks = nth(0, lambda piece: piece.ClearField("commit_hash"))
    assert isinstance(refused(hub, tmp_path), DownloadError)


def test_a_corrupt_header_is_a_broken_file(hub: Hub, tmp_path: Path) -> None:
    hub.chunks = nth(0, lambda piece: setattr(piece, "data", b"\xff" * len(piece.data)))
    assert isinstance(refused(hub, tmp_path), FormatError)


def test_a_corrupt_piece_is_found_by_the_manifests_digests(hub: Hub, tmp_path: Path) -> None:
    """The protocol has no checksums: digests of the checkpoint's own manifest are compared."""
    write_manifest(hub.models[MODEL], tensors=True)
    works(hub, tmp_path / "good", verify="digest")

    def spoil(piece: Any) -> None:
        piece.data = bytes(byte ^ 1 for byte in piece.data)

    hub.chunks = nth(20, spoil)
    with pytest.raises(IntegrityError) as caught:
        loadkit.load(MODEL, load_config=config(hub, tmp_path / "bad", verify="digest"))
    assert (caught.value.code, caught.value.file) == ("E_DIGEST", WEIGHTS)


# -- hostile lists --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/passwd", "a/../../b", "a\\b", "a\0b", "", "./x", "a//b", "C:x"]
)
def test_names_that_lead_out_are_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    def listing(answer: Any) -> Any:
        answer.files.add(relative_path=name, size=0)
        return answer

    hub.listing = listing
    assert isinstance(refused(hub, tmp_path), PathError)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("commit", ["..", "a/b", "../../x", "", "a\0b", "x" * 300, "a\nb"])
def test_commits_that_are_no_folders_are_refused(hub: Hub, tmp_path: Path, commit: str) -> None:
    hub.commit = commit
    assert isinstance(refused(hub, tmp_path), PathError)
    hub.names_commit = False
    assert isinstance(refused(hub, tmp_path), PathError)
    assert not (tmp_path / "cache").exists()


def test_lists_that_contradict_themselves(hub: Hub, tmp_path: Path) -> None:
    def twice(answer: Any) -> Any:
        answer.files.add(relative_path=WEIGHTS, size=1)
        return answer

    def wrong(answer: Any) -> Any:
        answer.total_size += 1
        return answer

    for change, said in (
        (lambda answer: model_pb2.ModelFileList(), "is empty"),
        (twice, "twice"),
        (wrong, "bytes in all"),
        (
            lambda answer: model_pb2.ModelFileList(
                files=[model_pb2.ModelFileInfo(relative_path=str(n)) for n in range(10_001)]
            ),
            "more than 10000",
        ),
    ):
        hub.listing = change
        assert said in refused(hub, tmp_path).message


# -- the cache ------------------------------------------------------------------------------------


def test_a_file_of_another_size_in_the_cache_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    works(hub, tmp_path)
    (found,) = (tmp_path / "cache").rglob(WEIGHTS)
    found.write_bytes(found.read_bytes()[:-1])
    hub.streamed.clear()
    works(hub, tmp_path)
    assert hub.streamed[WEIGHTS] >= 1


def test_files_that_came_whole_are_kept_when_a_later_one_fails(hub: Hub, tmp_path: Path) -> None:
    shutil.rmtree(hub.models[MODEL])
    write_llama(hub.models[MODEL], hidden=64, ffn=128, vocab=256, shards=2)
    second = "model-00002-of-00002.safetensors"

    def cut(name: str, pieces: Pieces) -> Pieces:
        return iter([]) if name == second and hub.streamed[second] > 1 else pieces

    hub.chunks = cut
    refused(hub, tmp_path)
    hub.chunks = lambda name, pieces: pieces
    hub.streamed.clear()
    works(hub, tmp_path)
    assert set(hub.streamed) == {second}


def test_a_cache_that_cannot_be_written_to(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(WriteError, match="cache"):
        loadkit.load(MODEL, load_config=config(hub, tmp_path))


def test_a_cache_that_leads_elsewhere_is_refused(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cache" / "models--org--model").symlink_to(tmp_path / "elsewhere")
    assert isinstance(refused(hub, tmp_path), PathError)
    assert not list((tmp_path / "elsewhere").rglob("*.safetensors"))


def test_another_process_that_stands_still_is_not_waited_for_for_ever(
    hub: Hub, tmp_path: Path
) -> None:
    lock = tmp_path / "cache" / "models--org--model" / ".modelexpress.lock"
    lock.parent.mkdir(parents=True)
    with _locked(lock, 1.0, lambda: 0):
        error = refused(hub, tmp_path, network_deadline=0.3)
    assert (error.code, error.detail["lock"]) == ("E_TIMEOUT", str(lock))


def test_of_several_that_load_at_once_one_fetches(hub: Hub, tmp_path: Path) -> None:
    done: list[Any] = []

    def load() -> None:
        source = loadkit.sources.open_source(
            f"mx://{hub.address}/{MODEL}", LoadConfig(cache_dir=str(tmp_path / "cache"))
        )
        with source:
            source.make_local([WEIGHTS])
            done.append(source.bytes_fetched)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 4
    assert hub.streamed[WEIGHTS] == 1
