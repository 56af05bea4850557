"""Load format tensorizer: whole models and ranks, saved and loaded, plain and encrypted."""

from __future__ import annotations

import errno
import json
import resource
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import loadkit
from helpers.checkpoints import write_llama
from helpers.tensorizer_files import GOOD, write_tensors
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    IntegrityError,
    ModelError,
    NotInstalledError,
    OptionError,
    ShardedError,
    UsageError,
    WriteError,
)
from loadkit.manifest import MANIFEST, parse_manifest

PLAIN = LoadConfig(use_tqdm_on_load=False)
Weights = dict[str, torch.Tensor]


def quiet(extra: Mapping[str, Any] | None = None, **fields: Any) -> LoadConfig:
    return LoadConfig(
        load_format="tensorizer",
        use_tqdm_on_load=False,
        model_loader_extra_config=dict(extra or {}),
        **fields,
    )


def load(folder: Path, tp: int = 1, rank: int = 0, **extra: Any) -> Any:
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    return loadkit.load(folder, parallel=parallel, load_config=quiet(extra))


def parameters(model: nn.Module) -> Weights:
    return {name: param.detach() for name, param in model.named_parameters()}


def same(found: nn.Module, expected: nn.Module) -> None:
    have, wanted = parameters(found), parameters(expected)
    assert have.keys() == wanted.keys()
    assert all(torch.equal(have[name], wanted[name]) for name in wanted)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


def plain(llama: Path, tp: int = 1, rank: int = 0) -> nn.Module:
    parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
    return loadkit.load_model(llama, parallel=parallel, load_config=PLAIN)


@pytest.fixture(scope="module")
def whole(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    loadkit.save(plain(llama), folder, save_format="tensorizer")
    return folder


@pytest.fixture(scope="module")
def ranks(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        loadkit.save(plain(llama, 2, rank), folder, save_format="tensorizer")
    return folder


# -- whole models ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_TZ_02_a_whole_model_is_cut_by_the_ordinary_weight_loaders(
    tp: int, llama: Path, whole: Path
) -> None:
    for rank in range(tp):
        result = load(whole, tp, rank)
        same(result.model, plain(llama, tp, rank))
        assert {row.exact for row in result.plan.rows if row.parameter} == {"exact"}
        assert result.plan.bytes_to_read == result.report.bytes_read


def test_a_saved_model_is_whole_names_and_all(llama: Path, whole: Path) -> None:
    from safetensors.torch import load_file
    from tensorizer import TensorDeserializer

    stored = {}
    for path in llama.glob("*.safetensors"):
        stored |= load_file(path)
    with TensorDeserializer(whole / "model.tensors", device="cpu", verify_hash=True) as reader:
        assert set(reader.keys()) == set(stored)
        assert all(torch.equal(reader[name].detach(), stored[name]) for name in stored)
    manifest = parse_manifest((whole / MANIFEST).read_bytes(), file=MANIFEST)
    assert manifest.layout == "checkpoint"
    assert set(manifest.files["model.tensors"].tensors) == set(stored)
    assert (whole / "config.json").exists()


def test_auto_finds_it(llama: Path, whole: Path) -> None:
    result = loadkit.load(whole, load_config=PLAIN)
    assert result.report.load_format == "tensorizer"
    same(result.model, plain(llama))


def test_a_rank_reads_its_own_bytes_where_hashes_are_left_out(whole: Path) -> None:
    one, part = (load(whole, tp, 0, verify_hash=False).report for tp in (1, 2))
    assert part.bytes_read == part.bytes_needed < 0.7 * one.bytes_read
    assert not part.verified


def test_a_rank_that_verifies_reads_the_tensors_it_uses_whole(whole: Path) -> None:
    one, part = (load(whole, tp, 0).report for tp in (1, 2))
    assert part.bytes_needed < one.bytes_needed
    assert part.verified["compared_bytes"] == one.verified["compared_bytes"]


def test_num_readers_are_threads_of_a_plain_file(llama: Path, whole: Path) -> None:
    result = load(whole, num_readers=2)
    same(result.model, plain(llama))


def test_a_model_that_the_library_wrote_by_itself(llama: Path, tmp_path: Path) -> None:
    """``write_module`` stores a tied head and a non-persistent buffer, too."""
    from tensorizer import TensorSerializer

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4)
            self.head = nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("angles", torch.arange(3.0), persistent=False)

    theirs, ours = Tied(), Tied()
    writer = TensorSerializer(tmp_path / "a.tensors")
    writer.write_module(theirs)
    writer.close()
    loadkit.load_into(ours, tmp_path / "a.tensors", load_config=quiet())
    assert torch.equal(ours.embed.weight, theirs.embed.weight)
    assert ours.head.weight is ours.embed.weight
    assert torch.equal(ours.angles, theirs.angles)
    loadkit.save(Tied(), tmp_path / "saved", save_format="tensorizer")
    found = dict(loadkit.iter_weights(tmp_path / "saved", load_config=quiet()))
    assert set(found) == {"embed.weight"}


def test_TZ_02_loading_keeps_parameters_and_what_refers_to_them(tmp_path: Path) -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.zeros(64, 32))
            self.second = nn.Parameter(torch.zeros(16))
            self.cache = {"first": self.first}

    write_tensors(tmp_path / "model.tensors", GOOD)
    module = Cached()
    before = module.first
    loadkit.load_into(module, tmp_path, load_config=quiet())
    assert module.first is before is module.cache["first"]
    assert torch.equal(module.cache["first"], GOOD["first"])


# -- ranks -----------------------------------------------------------------------------------------


def test_each_rank_takes_its_own_file(llama: Path, ranks: Path) -> None:
    for rank in range(2):
        result = load(ranks, 2, rank)
        same(result.model, plain(llama, 2, rank))
        assert result.report.bytes_read == result.report.bytes_needed
    named = load(ranks, 2, 1, tensorizer_uri="model-rank-%03d.tensors")
    same(named.model, plain(llama, 2, 1))


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "names"])
def test_TZ_02_a_missing_rank_is_an_error_naming_the_file(
    manifest: bool, ranks: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ranks, tmp_path / "ranks"))
    (folder / "model-rank-001.tensors").unlink()
    if not manifest:
        (folder / MANIFEST).unlink()
    for rank in range(2):
        with pytest.raises(ShardedError, match=r"model-rank-001\.tensors") as caught:
            load(folder, 2, rank)
        assert caught.value.file == "model-rank-001.tensors"
        assert caught.value.detail["world_size"] == 2


@pytest.mark.parametrize("manifest", [True, False], ids=["manifest", "names"])
@pytest.mark.parametrize("tp", [1, 4])
def test_a_set_of_ranks_states_its_world(
    tp: int, manifest: bool, ranks: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ranks, tmp_path / "ranks"))
    if not manifest:
        (folder / MANIFEST).unlink()
    with pytest.raises(ShardedError) as caught:
        load(folder, tp)
    expected = 4 if tp == 4 and not manifest else 2
    assert caught.value.detail["world_size"] == expected


def test_a_rank_file_is_not_taken_for_a_whole_model(ranks: Path) -> None:
    with pytest.raises(ShardedError, match="rank 0 of 2"):
        load(ranks, tensorizer_uri="model-rank-000.tensors")


def test_a_set_without_a_manifest_is_placed_by_name(
    llama: Path, ranks: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(ranks, tmp_path / "ranks"))
    (folder / MANIFEST).unlink()
    same(load(folder, 2, 1).model, plain(llama, 2, 1))


def test_one_rank_of_two_leaves_the_folder_as_it_was(llama: Path, tmp_path: Path) -> None:
    report = loadkit.save(plain(llama, 2, 0), tmp_path / "new", save_format="tensorizer")
    assert report.missing_ranks == (1,)
    assert not list((tmp_path / "new").glob("*.tensors"))


# -- places ----------------------------------------------------------------------------------------


def test_weights_may_lie_apart_from_the_config(llama: Path, whole: Path, tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    shutil.copy(llama / "config.json", apart)
    for uri in (str(whole / "model.tensors"), f"file://{whole / 'model.tensors'}"):
        same(load(apart, tensorizer_uri=uri).model, plain(llama))


def test_ranks_may_lie_apart_from_the_config(llama: Path, ranks: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    model = load(tmp_path, 2, 1, tensorizer_uri=str(ranks / "model-rank-%03d.tensors")).model
    same(model, plain(llama, 2, 1))


def test_several_files_have_to_be_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tensors(tmp_path / f"{name}.tensors", {"w": torch.full((2,), float(ord(name)))})
    with pytest.raises(OptionError, match=r"a\.tensors"):
        dict(loadkit.iter_weights(tmp_path, load_config=quiet()))
    found = dict(loadkit.iter_weights(tmp_path, load_config=quiet({"tensorizer_uri": "b.tensors"})))
    assert found["w"].tolist() == [98.0, 98.0]


@pytest.mark.parametrize(
    "uri", ["redis://x/y", "a%d.tensors", "%03d-%03d.tensors", "%02d/a.tensors", "a%s.tensors"]
)
def test_a_uri_that_cannot_be_is_refused(uri: str, whole: Path) -> None:
    with pytest.raises(OptionError, match="tensorizer_uri"):
        load(whole, tensorizer_uri=uri)


def test_options_of_s3_are_for_s3_alone_and_keys_are_not_told(whole: Path) -> None:
    with pytest.raises(OptionError, match="s3_secret_access_key") as caught:
        load(whole, s3_secret_access_key="hunter2hunter2")
    assert "hunter2" not in str(caught.value) + repr(caught.value.to_dict())


# -- encryption ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encrypted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("encrypted")
    key = folder / "key"
    loadkit.save(
        plain(llama),
        folder / "model",
        save_format="tensorizer",
        model_loader_extra_config={"encryption_keyfile": str(key)},
    )
    return folder / "model", key


@pytest.mark.parametrize("tp", [1, 2])
def test_an_encrypted_file_comes_through_the_library(
    tp: int, llama: Path, encrypted: tuple[Path, Path]
) -> None:
    folder, key = encrypted
    result = load(folder, tp, tp - 1, encryption_keyfile=str(key))
    same(result.model, plain(llama, tp, tp - 1))
    assert "OPAQUE_LOADER" in {note.code for note in result.plan.notes}


def test_the_key_is_made_once_and_is_its_owners_alone(
    llama: Path, encrypted: tuple[Path, Path], tmp_path: Path
) -> None:
    key = encrypted[1]
    assert (key.stat().st_size, stat.S_IMODE(key.stat().st_mode)) == (32, 0o600)
    before = key.read_bytes()
    extra = {"encryption_keyfile": str(key)}
    model = plain(llama)
    kept = {name: param.clone() for name, param in parameters(model).items()}
    loadkit.save(model, tmp_path / "b", save_format="tensorizer", model_loader_extra_config=extra)
    assert key.read_bytes() == before
    assert all(torch.equal(param, kept[name]) for name, param in parameters(model).items())
    weights = {name: p.flatten()[:64].numpy().tobytes() for name, p in kept.items() if p.dim() > 1}
    stored = (tmp_path / "b" / "model.tensors").read_bytes()
    assert not [name for name, part in weights.items() if part in stored]


def test_a_wrong_key_is_typed_and_told_to_nobody(
    encrypted: tuple[Path, Path], tmp_path: Path
) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"0123456789abcdef" * 2)
    with pytest.raises(IntegrityError) as caught:
        load(encrypted[0], encryption_keyfile=str(wrong))
    assert caught.value.code == "E_DECRYPT"
    assert "0123456789abcdef" not in repr(caught.value.to_dict())


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_file_of_another_size_is_refused(
    size: int, encrypted: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(b"s" * size)
    with pytest.raises(OptionError, match="encryption_keyfile"):
        load(encrypted[0], encryption_keyfile=str(tmp_path / "key"))


def test_a_key_is_needed_and_only_where_it_is(encrypted: tuple[Path, Path], whole: Path) -> None:
    with pytest.raises(OptionError, match="is encrypted"):
        load(encrypted[0])
    with pytest.raises(OptionError, match="is not encrypted"):
        load(whole, encryption_keyfile=str(encrypted[1]))
    with pytest.raises(OptionError, match="num_readers"):
        load(encrypted[0], encryption_keyfile=str(encrypted[1]), num_readers=2)


def test_a_damaged_encrypted_file_is_refused(encrypted: tuple[Path, Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(encrypted[0], tmp_path / "model"))
    path = folder / "model.tensors"
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        load(folder, encryption_keyfile=str(encrypted[1]))


def test_encrypted_ranks(llama: Path, tmp_path: Path) -> None:
    extra = {"encryption_keyfile": str(tmp_path / "key")}
    for rank in range(2):
        loadkit.save(
            plain(llama, 2, rank),
            tmp_path / "model",
            save_format="tensorizer",
            model_loader_extra_config=extra,
        )
    same(load(tmp_path / "model", 2, 1, **extra).model, plain(llama, 2, 1))


# -- saving ----------------------------------------------------------------------------------------


def test_a_folder_holds_one_model(llama: Path, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    loadkit.save(plain(llama), folder, save_format="tensorizer")
    assert not list(folder.glob("*.safetensors*"))
    loadkit.save(load(folder).model, folder)
    assert not list(folder.glob("*.tensors"))


def test_a_model_may_be_saved_over_what_it_is_a_view_of(
    llama: Path, whole: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    model = load(folder).model
    loadkit.save(model, folder, save_format="tensorizer")
    same(model, plain(llama))
    same(load(folder).model, plain(llama))


@pytest.mark.parametrize(
    "extra",
    [
        {"tensorizer_uri": "s3://bucket/model.tensors"},
        {"tensorizer_uri": "/tmp/model.tensors"},
        {"tensorizer_uri": "model.bin"},
        {"save_id": "word"},
        {"verify_hash": True},
    ],
)
def test_options_that_a_save_cannot_follow_are_refused(
    extra: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError):
        loadkit.save(
            plain(llama), tmp_path / "m", save_format="tensorizer", model_loader_extra_config=extra
        )
    assert not (tmp_path / "m").exists()


def test_one_rank_alone_is_no_whole_model(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one rank's part"):
        loadkit.save(
            plain(llama, 2, 0),
            tmp_path / "m",
            save_format="tensorizer",
            model_loader_extra_config={"tensorizer_uri": "model.tensors"},
        )


def test_more_tensors_than_the_index_holds_is_said(tmp_path: Path) -> None:
    many = nn.ParameterDict({"x" * 90 + str(n): nn.Parameter(torch.zeros(1)) for n in range(2200)})
    with pytest.raises(ModelError) as caught:
        loadkit.save(many, tmp_path / "m", save_format="tensorizer")
    assert caught.value.code == "E_LIMIT"
    assert not (tmp_path / "m").exists()


def test_a_full_disk_leaves_the_old_folder(llama: Path, whole: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    before = (folder / "model.tensors").read_bytes()
    model = plain(llama)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 18) + 5000, hard))
    try:
        with pytest.raises(WriteError) as caught:
            loadkit.save(model, folder, save_format="tensorizer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert (folder / "model.tensors").read_bytes() == before


# -- the commands ----------------------------------------------------------------------------------


def test_inspect_and_verify_read_its_headers(whole: Path) -> None:
    from click.testing import CliRunner

    from loadkit.cli.app import cli

    shown = CliRunner().invoke(cli, ["inspect", str(whole / "model.tensors"), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.output)
    assert (found["formats"], len(found["tensors"])) == (["tensorizer"], 21)
    assert loadkit.verify(whole).ok


# -- without the library ---------------------------------------------------------------------------


def test_plain_files_are_read_without_the_library(
    llama: Path, whole: Path, encrypted: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loadkit_tensorizer.library.installed_version", lambda _: None)
    same(load(whole).model, plain(llama))
    with pytest.raises(NotInstalledError, match="pip install"):
        load(encrypted[0], encryption_keyfile=str(encrypted[1]))
    with pytest.raises(NotInstalledError, match="pip install"):
        loadkit.save(plain(llama), whole, save_format="tensorizer")
