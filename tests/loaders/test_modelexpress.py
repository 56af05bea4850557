"""Weights from a ModelExpress server: the real client against a server on loopback."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.model_express import COMMIT, Hub, model_express
from loadkit.availability import NEEDS_EXTRA, READY
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import NotInstalledError, OptionError, PathError, PlanError, ReadError
from loadkit.sources import open_source
from loadkit_modelexpress import address, availability, library
from loadkit_modelexpress.options import check_strategies

MODEL = "org/model"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("MODEL_EXPRESS_URL", "MX_SERVER_ADDRESS", "MODEL_EXPRESS_CACHE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    write_llama(tmp_path / "model", shards=2)
    with model_express() as made:
        made.models[MODEL] = tmp_path / "model"
        yield made


def config(hub: Hub, folder: Path, /, **changes: Any) -> LoadConfig:
    options = {"server": hub.address, **changes.pop("options", {})}
    return LoadConfig(
        load_format="modelexpress", cache_dir=str(folder / "cache"),
        model_loader_extra_config=options, use_tqdm_on_load=False, **changes,
    )  # fmt: skip


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    first, second = dict(one.named_parameters()), dict(other.named_parameters())
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# -- loads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2])
def test_every_rank_has_the_parameters_of_a_plain_load(hub: Hub, tmp_path: Path, tp: int) -> None:
    for rank in range(tp):
        parallel = ParallelConfig(tp_size=tp, tp_rank=rank)
        found = loadkit.load(MODEL, parallel=parallel, load_config=config(hub, tmp_path))
        assert same(found.model, loadkit.load_model(tmp_path / "model", parallel=parallel))
        assert found.report.load_format == "modelexpress"
        assert found.report.source == f"mx://{hub.address}/{MODEL}@{COMMIT}"
        assert found.report.warnings == []


def test_a_rank_reads_its_part_of_the_files(hub: Hub, tmp_path: Path) -> None:
    whole = loadkit.load(MODEL, load_config=config(hub, tmp_path))
    part = loadkit.load(
        MODEL, parallel=ParallelConfig(tp_size=2), load_config=config(hub, tmp_path)
    )
    assert part.report.bytes_read == part.plan.bytes_to_read < 0.8 * whole.report.bytes_read


def test_a_plan_fetches_begins_of_files_and_keeps_nothing(hub: Hub, tmp_path: Path) -> None:
    write_llama(hub.models[MODEL], hidden=256, ffn=1024, vocab=2048, layers=1)
    for path in hub.models[MODEL].glob("*0000*"):
        path.unlink()  # shards of the smaller one
    (hub.models[MODEL] / "model.safetensors.index.json").unlink()
    plan = loadkit.plan(MODEL, load_config=config(hub, tmp_path))
    size = (hub.models[MODEL] / "model.safetensors").stat().st_size
    assert plan.ok
    assert plan.bytes_to_read > 0.9 * size
    assert 0 < plan.bytes_fetched < 0.02 * size
    assert not (tmp_path / "cache").exists()
    (note,) = [note for note in plan.notes if note.code == "DOWNLOAD"]
    assert note.hint is None, "the source cannot stream"


def test_a_second_load_sends_no_weights(hub: Hub, tmp_path: Path) -> None:
    loadkit.load(MODEL, load_config=config(hub, tmp_path))
    hub.streamed.clear()
    again = loadkit.load(MODEL, load_config=config(hub, tmp_path))
    assert hub.streamed == {}
    assert again.report.bytes_fetched == 0


def test_files_lie_where_the_hubs_libraries_look(hub: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    loadkit.load(MODEL, load_config=config(hub, tmp_path))
    found = Path(snapshot_download(MODEL, cache_dir=tmp_path / "cache", local_files_only=True))
    assert found.name == COMMIT
    names = {path.name for path in found.iterdir()}
    assert names == {path.name for path in hub.models[MODEL].iterdir()}


def test_a_server_that_names_no_commit_is_asked_by_a_files_begin(hub: Hub, tmp_path: Path) -> None:
    hub.names_commit = False
    found = loadkit.load(MODEL, load_config=config(hub, tmp_path))
    assert found.report.source.endswith(f"@{COMMIT}")


def test_an_address_names_server_and_model(hub: Hub, tmp_path: Path) -> None:
    uri = f"mx://{hub.address}/{MODEL}"
    plain = LoadConfig(cache_dir=str(tmp_path / "cache"), use_tqdm_on_load=False)
    found = loadkit.load(uri, load_config=plain)
    assert found.report.load_format == "safetensors"
    assert same(found.model, loadkit.load_model(tmp_path / "model"))


@pytest.mark.parametrize("name", ["MODEL_EXPRESS_URL", "MX_SERVER_ADDRESS"])
def test_the_packages_variables_name_the_server(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("MX_SERVER_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv(name, f"http://{hub.address}")
    plain = LoadConfig(load_format="modelexpress", cache_dir=str(tmp_path / "cache"))
    assert loadkit.plan(MODEL, load_config=plain).ok


def test_a_subfolder_and_a_pinned_revision(hub: Hub, tmp_path: Path) -> None:
    write_llama(hub.models[MODEL] / "inner", seed=7)
    found = loadkit.load(
        MODEL, load_config=config(hub, tmp_path, subfolder="inner", revision=COMMIT)
    )
    assert same(found.model, loadkit.load_model(tmp_path / "model" / "inner"))
    assert {name.partition("/")[0] for name in hub.streamed} == {"inner"}


def test_load_into_and_iter_weights_take_the_same_way(hub: Hub, tmp_path: Path) -> None:
    plain = loadkit.load_model(tmp_path / "model")
    module = loadkit.load_model(MODEL, load_config=config(hub, tmp_path))
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)
    loadkit.load_into(module, MODEL, load_config=config(hub, tmp_path))
    assert same(module, plain)
    names = {name for name, _ in loadkit.iter_weights(MODEL, load_config=config(hub, tmp_path))}
    assert names == {name for name, _ in loadkit.iter_weights(tmp_path / "model")}


def test_shared_storage_streams_no_weights_and_says_what_is_missing(
    hub: Hub, tmp_path: Path
) -> None:
    shared = config(hub, tmp_path, options={"shared_storage": True})
    with pytest.raises(PathError, match="shared_storage") as caught:
        loadkit.plan(MODEL, load_config=shared)
    assert len(caught.value.detail["missing"]) == len(list(hub.models[MODEL].iterdir()))
    loadkit.load(MODEL, load_config=config(hub, tmp_path))
    hub.streamed.clear()
    assert same(
        loadkit.load_model(MODEL, load_config=shared), loadkit.load_model(tmp_path / "model")
    )
    assert hub.streamed == {}


def test_the_strictness_is_that_of_safetensors(hub: Hub, tmp_path: Path) -> None:
    weights = write_llama(hub.models[MODEL], layers=1)
    for path in hub.models[MODEL].glob("*0000*"):
        path.unlink()
    (hub.models[MODEL] / "model.safetensors.index.json").unlink()
    assert "model.layers.1.mlp.up_proj.weight" not in weights
    values = json.loads((hub.models[MODEL] / "config.json").read_text())
    (hub.models[MODEL] / "config.json").write_text(json.dumps({**values, "num_hidden_layers": 2}))
    with pytest.raises(PlanError, match=r"layers\.1"):
        loadkit.load(MODEL, load_config=config(hub, tmp_path))
    assert not list((tmp_path / "cache").rglob("*.safetensors")), "refused before it was fetched"


# -- the chain ------------------------------------------------------------------------------------


def test_the_next_place_of_the_chain_is_taken_and_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from loadkit_modelexpress import calls

    monkeypatch.setattr(calls, "FIRST_WAIT", 0.001)
    loadkit.load(MODEL, load_config=config(hub, tmp_path))  # the hub's cache has it now
    folder = next((tmp_path / "cache").rglob("snapshots")) / COMMIT
    dead = {"server": "127.0.0.1:1", "strategies": ["server", "source"]}
    chain = config(hub, tmp_path, options=dead)
    pytest.importorskip("loadkit_hub")
    found = loadkit.load(MODEL, load_config=chain)
    assert same(found.model, loadkit.load_model(folder))
    (warning,) = [one for one in found.report.warnings if "server was left" in one]
    assert "127.0.0.1:1" in warning


def test_p2p_without_nixl_is_left_and_told(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelexpress.nixl_transfer.is_nixl_available", lambda: False)
    chain = config(hub, tmp_path, options={"strategies": ["p2p", "server"]})
    found = loadkit.load(MODEL, dtype="float32", load_config=chain)
    assert same(found.model, loadkit.load_model(tmp_path / "model", dtype="float32"))
    assert any("p2p was left" in one and "NIXL" in one for one in found.report.warnings)
    alone = config(hub, tmp_path, options={"strategies": ["p2p"], "model_name": MODEL})
    with pytest.raises(NotInstalledError, match="NIXL") as caught:
        loadkit.load(tmp_path / "model", dtype="float32", load_config=alone)
    assert caught.value.detail["needs"] == ["NIXL"]
    assert "pip install nixl-cu12" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "is empty"),
        (["disk"], "'disk'"),
        (["server", "server"], "twice"),
        (["server", "p2p"], "after files"),
    ],
)
def test_a_chain_that_makes_no_sense_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        check_strategies(given)


# -- options, addresses, what is installed --------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["mx://host/org/model", "mx://host:99999/org/model", "mx://host:80/model", "mx://h:80/../m/x",
     "mx://h:80/o/m/../x", "https://h:80"],
)  # fmt: skip
def test_addresses_that_are_none(text: str) -> None:
    read = address.checked_server if text.startswith("https") else address.parse_address
    with pytest.raises((OptionError, PathError)):
        read(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mx://h:80/org/model@v1.0/sub/dir", ("h:80", "org/model", "v1.0", "sub/dir")),
        ("mx://[::1]:80/org/model", ("[::1]:80", "org/model", None, "")),
        ("hf://org/model@main", ("", "org/model", "main", "")),
        ("org/model", ("", "org/model", None, "")),
    ],
)
def test_addresses(text: str, expected: tuple[Any, ...]) -> None:
    found = address.parse_address(text)
    assert (found.server, found.model, found.revision, found.path) == expected


def test_two_servers_and_two_revisions_are_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is on"):
        address.server_of("other:1", "one:1")
    with pytest.raises(OptionError, match="revision"):
        address.parse_address("org/model@a", "b")
    with pytest.raises(OptionError, match="is a path"):
        loadkit.plan(tmp_path / "model", load_config=config(hub, tmp_path))
    both = config(hub, tmp_path, download_dir=str(tmp_path / "other"))
    with pytest.raises(OptionError, match="one folder"):
        loadkit.plan(MODEL, load_config=both)


def test_CFG_06_an_option_that_is_unknown_names_the_nearest(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="'server'"):
        loadkit.plan(MODEL, load_config=config(hub, tmp_path, options={"servr": "x"}))


def test_without_the_package_the_error_says_the_pip_line(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert availability.state() == READY
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: None)
    monkeypatch.setattr(library, "installed_version", lambda _: None)
    assert availability.state() == NEEDS_EXTRA
    with pytest.raises(NotInstalledError, match=r"pip install --no-deps .modelexpress>=0\.7"):
        loadkit.plan(MODEL, load_config=config(hub, tmp_path))


def test_the_row_of_the_formats_says_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from loadkit.cli.formats import format_rows

    (row,) = [row for row in format_rows() if row["name"] == "modelexpress"]
    assert (row["state"], row["library"], row["install"]) == (READY, "modelexpress", None)
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: None)
    (row,) = [row for row in format_rows() if row["name"] == "modelexpress"]
    assert (row["state"], row["install"]) == (NEEDS_EXTRA, availability.INSTALL)


def test_what_says_the_state_imports_neither_package_nor_torch() -> None:
    import subprocess

    code = (
        "import sys, loadkit_modelexpress.availability as a; a.state()\n"
        "sys.exit(bool({'torch', 'grpc', 'modelexpress'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_file_that_was_not_fetched_gives_its_begin_only(hub: Hub, tmp_path: Path) -> None:
    source = open_source(
        f"mx://{hub.address}/{MODEL}", LoadConfig(cache_dir=str(tmp_path / "cache"))
    )
    with source:
        file = source.open("model-00001-of-00002.safetensors")
        data = (hub.models[MODEL] / file.name).read_bytes()
        assert file.read(10, 100) == data[10:110]
        assert not file.local
        with pytest.raises(ReadError, match="no file"):
            source.open("nothing.json")
        source.make_local([file.name])
        assert file.local
        assert file.read(0, file.size) == data


@pytest.mark.parametrize("command", ["plan", "load"])
def test_the_command_line_asks_the_server_and_nobody_else(
    hub: Hub, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from loadkit.cli import main

    monkeypatch.setenv("MX_SERVER_ADDRESS", hub.address)
    code = main([command, MODEL, "--load-format", "modelexpress", "--tp", "2"])
    assert code == 0, capsys.readouterr().err
    assert hub.asked["list"]
