"""``verify``: sizes and digests, whoever says what a file should hold, whoever reads it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_index, write_llama, write_st
from helpers.digests import NAME, corrupt, place_of, sha256, write_manifest
from helpers.gguf_files import lone_llama
from helpers.watching import loadkit_threads, watched_reads
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ChangedError, IntegrityError
from loadkit.integrity import digests, sidecar, units
from loadkit.integrity import reader as verifying
from loadkit.manifest import MANIFEST
from loadkit.safetensors_format import read_header
from loadkit.sources.local_file import LocalFile

READERS: dict[str, dict[str, Any]] = {
    "alias": {},
    "pread": {"alias": "never", "reader": "pread"},
    "mmap": {"alias": "never", "reader": "mmap"},
    "eager": {"safetensors_load_strategy": "eager"},
    "prefetch": {"safetensors_load_strategy": "prefetch"},
}
Corrupt = Callable[[int], None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Records of this test alone."""
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "loadkit" / "digests"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy file has a hundred of them."""
    set_block(monkeypatch, 256)


def set_block(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    for module in (digests, verifying, sidecar, units):
        monkeypatch.setattr(module, "BLOCK", nbytes)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    write_llama(tmp_path / "llama")
    return tmp_path / "llama"


def by(**options: Any) -> LoadConfig:
    return LoadConfig(**{"verify": "digest", **options})


def data_start(folder: Path) -> int:
    file = LocalFile(NAME, str(folder / NAME))
    offset = min(info.offset for info in read_header(file).tensors)
    file.close()
    return offset


def as_hub_cache(folder: Path, root: Path) -> Path:
    """The same checkpoint as the hub's client keeps it."""
    repo = root / "models--org--llama"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    data = (folder / NAME).read_bytes()
    (repo / "blobs" / sha256(data)).write_bytes(data)
    (snapshot / NAME).symlink_to(f"../../blobs/{sha256(data)}")
    shutil.copy(folder / "config.json", snapshot)
    return snapshot


SOURCES = ["manifest of tensors", "manifest of files", "hub", "record"]


def recorded(folder: Path) -> None:
    """A first load's record."""
    assert loadkit.load(folder, load_config=by()).report.verified["recorded_bytes"] > 0


def prepared(source: str, folder: Path, root: Path) -> tuple[Path, Path]:
    """A checkpoint of which somebody knows the digests, and its real weight file."""
    if source == "hub":
        snapshot = as_hub_cache(folder, root)
        return snapshot, Path(os.path.realpath(snapshot / NAME))
    if source == "record":
        recorded(folder)
    else:
        write_manifest(folder, tensors=source == "manifest of tensors")
    return folder, folder / NAME


@pytest.mark.parametrize("options", READERS.values(), ids=READERS)
@pytest.mark.parametrize("source", SOURCES)
def test_a_good_file_is_found_good_and_the_plan_knew_what_that_reads(
    llama: Path, tmp_path: Path, source: str, options: dict[str, Any]
) -> None:
    plain = {name: t.clone() for name, t in loadkit.load(llama).model.state_dict().items()}
    folder, path = prepared(source, llama, tmp_path)
    for dtype, tp in (("auto", 1), ("auto", 2), ("float64", 2)):
        parallel = ParallelConfig(tp_size=tp, tp_rank=tp - 1)
        found = loadkit.load(folder, load_config=by(**options), dtype=dtype, parallel=parallel)
        report = found.report
        assert report.bytes_read == found.plan.bytes_to_read
        assert report.verified["recorded_bytes"] == 0
        if tp == 1:
            state = found.model.state_dict()
            assert all(torch.equal(state[name], tensor) for name, tensor in plain.items())
            unknown = data_start(llama) if source == "manifest of tensors" else 0  # the header
            assert report.verified["compared_bytes"] == path.stat().st_size - unknown
    assert not loadkit_threads()


@pytest.mark.parametrize("options", READERS.values(), ids=READERS)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["auto", "float64"])
def test_one_wrong_bit_is_an_error_that_names_extent_and_tensor(
    llama: Path, tmp_path: Path, source: str, options: dict[str, Any], dtype: str
) -> None:
    folder, path = prepared(source, llama, tmp_path)
    tensor = "model.layers.1.mlp.down_proj.weight"
    offset, nbytes = place_of(llama, tensor)
    corrupt(path, offset + nbytes // 2)
    with pytest.raises(IntegrityError) as caught:
        loadkit.load(folder, load_config=by(**options), dtype=dtype)
    error = caught.value
    start, end = error.detail["extent"]
    assert error.code == "E_DIGEST" and error.file == NAME
    assert start <= offset + nbytes // 2 < end and error.offset == start
    assert tensor in error.detail["tensors"]
    assert error.detail["found"] != error.detail["expected"]
    assert error.hint and str(start) in error.message and str(end) in error.message
    if source == "manifest of tensors":
        assert error.tensor == tensor and (start, end) == (offset, offset + nbytes)
    assert not loadkit_threads()


def test_a_rank_reads_and_verifies_the_blocks_that_it_touches(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(llama)
    tensor = "model.layers.0.self_attn.q_proj.weight"
    offset, _ = place_of(llama, tensor)
    size = (llama / NAME).stat().st_size
    parallel = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]
    for rank in range(2):
        with watched_reads(monkeypatch) as reads:
            found = loadkit.load(
                llama, load_config=by(reader="pread"), parallel=parallel[rank]
            ).report
        assert found.bytes_read == reads.nbytes  # and nothing was read a second time unseen
        assert found.verified["compared_bytes"] < size
    corrupt(llama / NAME, offset)  # in the first rank's half alone
    with pytest.raises(IntegrityError, match="q_proj"):
        loadkit.load(llama, load_config=by(), parallel=parallel[0])


def test_a_block_wanted_whole_is_read_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(llama, tensors=True)
    with watched_reads(monkeypatch) as reads:
        report = loadkit.load(llama, load_config=by(reader="pread")).report
    data = (llama / NAME).stat().st_size - data_start(llama)
    assert reads.nbytes == report.bytes_read == data == report.verified["compared_bytes"]


def test_the_header_is_verified_too(llama: Path) -> None:
    recorded(llama)
    path = llama / NAME
    data = path.read_bytes()
    at = data.index(b"format")
    before = path.stat()
    path.write_bytes(data[:at] + b"forma_" + data[at + 6 :])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(IntegrityError) as caught:
        loadkit.load(llama, load_config=by())
    assert caught.value.detail["extent"][0] == 0


def test_a_damaged_file_is_not_told_as_a_model_that_does_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "tied"
    write_cfg(folder, tie_word_embeddings=True)
    state = llama_sd()
    write_st(folder / NAME, {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()})
    recorded(folder)
    offset, _ = place_of(folder, "lm_head.weight")
    corrupt(folder / NAME, offset)
    with pytest.raises(IntegrityError):  # not TIED_DIFFER
        loadkit.load(folder, load_config=by())


# -- records of a first load -----------------------------------------------------------------------


def test_a_first_load_records_and_says_so(llama: Path, cache: Path) -> None:
    first = loadkit.load(llama, load_config=by()).report.verified
    assert first["compared_bytes"] == 0
    assert first["recorded_bytes"] == (llama / NAME).stat().st_size
    assert len(list(cache.iterdir())) == 1
    assert [p.name for p in llama.iterdir() if "digest" in p.name] == []
    second = loadkit.load(llama, load_config=by()).report.verified
    assert second["compared_bytes"] == first["recorded_bytes"] and second["recorded_bytes"] == 0


def test_ranks_add_what_they_read_to_the_record(llama: Path) -> None:
    parallel = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in range(2)]
    first = loadkit.load(llama, load_config=by(), parallel=parallel[0]).report.verified
    second = loadkit.load(llama, load_config=by(), parallel=parallel[1]).report.verified
    size = (llama / NAME).stat().st_size
    assert 0 < first["recorded_bytes"] < size and second["recorded_bytes"] > 0
    assert second["compared_bytes"] > 0  # blocks that both touch
    whole = loadkit.load(llama, load_config=by()).report.verified
    assert whole["compared_bytes"] == size


def test_a_file_that_was_written_is_a_new_one(llama: Path) -> None:
    recorded(llama)
    path = llama / NAME
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(1, 1))
    assert loadkit.load(llama, load_config=by()).report.verified["recorded_bytes"] == len(data)


def test_records_go_beside_the_checkpoint_where_that_was_asked_for(
    llama: Path, cache: Path, tmp_path: Path
) -> None:
    config = by(digest_store="checkpoint")
    loadkit.load(llama, load_config=config)
    beside = llama / f"{NAME}{sidecar.SIDECAR_SUFFIX}"
    assert beside.is_file() and not cache.exists()
    moved = tmp_path / "moved"
    shutil.copytree(llama, moved)  # the record travels along
    corrupt(moved / NAME, -5)
    with pytest.raises(IntegrityError, match="earlier load"):
        loadkit.load(moved, load_config=config)


def test_records_of_a_folder_that_cannot_be_written_go_to_the_cache(
    llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    loadkit.load(llama, load_config=by(digest_store="checkpoint"))
    assert len(list(cache.iterdir())) == 1


def test_nothing_is_kept_where_that_was_asked_for(llama: Path, cache: Path) -> None:
    for _ in range(2):
        report = loadkit.load(llama, load_config=by(digest_store="none")).report
        assert report.verified["compared_bytes"] == 0
    assert not cache.exists()


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"not json",
        b"[]",
        b'{"schema": "loadkit.digests/1"}',
        b'{"schema": "loadkit.digests/1", "identity": [], "block_bytes": 1024, "sha256": null, '
        b'"blocks": {"0": "zz"}}',
    ],
    ids=["empty", "text", "array", "bare", "bad digest"],
)
def test_a_damaged_record_is_told_and_replaced(llama: Path, cache: Path, damage: bytes) -> None:
    recorded(llama)
    (record,) = cache.iterdir()
    record.write_bytes(damage)
    report = loadkit.load(llama, load_config=by()).report
    assert any(str(record) in warning for warning in report.warnings)
    assert report.verified["recorded_bytes"] > 0
    assert not loadkit.load(llama, load_config=by()).report.warnings


def test_a_cache_that_cannot_be_written_is_a_warning(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "file"))
    report = loadkit.load(llama, load_config=by()).report
    assert any("keep digests" in warning for warning in report.warnings)


def test_a_record_never_outweighs_a_manifest_or_a_hub(llama: Path, cache: Path) -> None:
    recorded(llama)
    write_manifest(llama, tensors=False)
    (record,) = cache.iterdir()
    content = json.loads(record.read_bytes())
    content["blocks"] = dict.fromkeys(content["blocks"], "0" * 64)  # a record that is all wrong
    record.write_text(json.dumps(content))
    report = loadkit.load(llama, load_config=by()).report
    assert report.verified["files"] == {NAME: MANIFEST}
    # Blocks that were recorded while the manifest's digest was found right help from now on.
    again = loadkit.load(llama, load_config=by()).report
    assert MANIFEST in again.verified["files"][NAME] and "record" in again.verified["files"][NAME]


def test_a_whole_files_digest_takes_the_whole_file_once_and_then_the_parts(
    llama: Path, tmp_path: Path
) -> None:
    folder, path = prepared("hub", llama, tmp_path)
    size = path.stat().st_size
    parallel = ParallelConfig(tp_size=4, tp_rank=3)
    first = loadkit.load(folder, load_config=by(), parallel=parallel).report
    assert first.verified["compared_bytes"] == size and first.verified["files"] == {NAME: "the hub"}
    second = loadkit.load(folder, load_config=by(), parallel=parallel).report
    assert second.bytes_read <= first.bytes_read
    assert second.verified["compared_bytes"] < size


# -- sizes, and files that change ------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["size", "digest"])
def test_a_file_of_another_size_than_the_manifest_says_is_refused(llama: Path, verify: str) -> None:
    write_manifest(llama, tensors=False, size=123456)
    for call in (loadkit.plan, loadkit.load):
        with pytest.raises(IntegrityError, match="not 123456") as caught:
            call(llama, load_config=LoadConfig(verify=verify))
        assert caught.value.code == "E_SIZE" and caught.value.file == NAME
    assert loadkit.load(llama, load_config=LoadConfig(verify="off")).model is not None


@pytest.mark.parametrize("name", [NAME, "config.json", "model.safetensors.index.json"])
def test_a_file_that_changes_during_the_load_fails_it_mapped_index_and_config_too(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "indexed"
    write_llama(folder)
    names = [tensor for tensor, _ in loadkit.iter_weights(folder)]
    write_index(folder, dict.fromkeys(names, NAME))

    from loadkit import finish

    real = finish.check_ready

    def late(model: torch.nn.Module) -> None:
        real(model)
        os.utime(folder / name, ns=(5, 5))

    from loadkit import loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "check_ready", late)
        with pytest.raises(ChangedError) as caught:
            loadkit.load(folder)
    assert caught.value.file == name


# -- iterating -------------------------------------------------------------------------------------

THREADED = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 3}}


@pytest.mark.parametrize("options", [{}, THREADED, READERS["eager"]], ids=["one", "three", "eager"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_tensor_is_verified_before_it_is_handed_out(
    llama: Path, tmp_path: Path, source: str, options: dict[str, Any]
) -> None:
    plain = dict(loadkit.iter_weights(llama))
    folder, path = prepared(source, llama, tmp_path)
    found = dict(loadkit.iter_weights(folder, load_config=by(**options)))
    assert list(found) == list(plain)
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())
    tensor = list(plain)[-3]
    corrupt(path, place_of(llama, tensor)[0])
    given: list[str] = []
    weights = loadkit.iter_weights(folder, load_config=by(**options))
    with pytest.raises(IntegrityError) as caught:
        given.extend(name for name, _ in weights)
    assert tensor not in given and tensor in caught.value.detail["tensors"]
    assert not loadkit_threads()


def test_blocks_are_four_mebibytes(
    llama: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    set_block(monkeypatch, 4 << 20)
    recorded(llama)
    (record,) = cache.iterdir()
    content = json.loads(record.read_bytes())
    assert content["block_bytes"] == 4 << 20
    assert content["blocks"] == {"0": sha256((llama / NAME).read_bytes())}
    found = loadkit.load(llama, load_config=by(reader="pread"))
    assert found.report.bytes_read == found.plan.bytes_to_read


@pytest.mark.parametrize("options", [{}, {"reader": "pread"}], ids=["map", "pread"])
def test_a_gguf_file_is_verified_as_it_is_decoded(tmp_path: Path, options: dict[str, Any]) -> None:
    path = lone_llama(tmp_path / "toy.gguf")
    for expected in ("recorded_bytes", "compared_bytes"):
        found = loadkit.load(path, load_format="gguf", dtype="bfloat16", load_config=by(**options))
        assert found.report.verified[expected] > 0
        assert found.report.bytes_read == found.plan.bytes_to_read
    corrupt(path, path.stat().st_size - 100)
    with pytest.raises(IntegrityError, match="ffn_down"):
        loadkit.load(path, load_format="gguf", dtype="bfloat16", load_config=by(**options))
