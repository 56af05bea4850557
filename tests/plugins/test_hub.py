"""Repositories of the hub: what is meant, what is fetched of them, and who may."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_sparse_llama
from helpers.cli import spawn
from helpers.gguf_files import lone_llama
from helpers.hub_server import TOKEN, Hub, ask_hub, hub_server
from loadkit.config import LoadConfig
from loadkit.errors import (
    DownloadError,
    LoadkitError,
    NoWeightsError,
    OptionError,
    PathError,
    ReadError,
)
from loadkit.sources import open_source, scheme_of
from loadkit_hub.address import parse_address

STREAM = LoadConfig(stream=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one repository, ``org/toy``: a Llama in two shards."""
    write_llama(tmp_path / "toy", shards=2)
    with hub_server(org__toy=tmp_path / "toy") as server:
        ask_hub(server, tmp_path / "home", monkeypatch)
        yield server


def same(model: torch.nn.Module, folder: Path) -> None:
    """The model is what the folder holds, bit for bit."""
    expected = loadkit.load_model(folder).state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def weight_requests(hub: Hub) -> list[str]:
    return [r.path for r in hub.requests if r.path.endswith((".safetensors", ".bin", ".pth"))]


# -- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("org/name", ("org/name", None, "", "")),
        ("hf://org/name", ("org/name", None, "", "")),
        ("hf://models/org/name/", ("org/name", None, "", "")),
        ("HF://org/name@v1.0/sub/folder", ("org/name", "v1.0", "sub/folder", "")),
        ("hf://org/name@refs/pr/7/sub", ("org/name", "refs/pr/7", "sub", "")),
        ("hf://org/name@feature%2Fx", ("org/name", "feature/x", "", "")),
        ("org/name:Q4_K_M", ("org/name", None, "", "Q4_K_M")),
        ("hf://org/name@main:Q8_0", ("org/name", "main", "", "Q8_0")),
    ],
)
def test_an_address_says_repository_revision_path_and_quantisation(
    uri: str, expected: tuple[Any, ...]
) -> None:
    found = parse_address(uri, "hf", None, None)
    assert (found.repo, found.revision, found.path, found.quant) == expected


@pytest.mark.parametrize(
    "uri",
    [
        "hf://org",
        "hf://datasets/org/name",
        "hf://org/name@a%2F..%2Fb",
        "hf://org/..",
        "hf://or g/name",
        "hf://org/name@",
        "hf:///",
        "hf://org/na\nme",
    ],
)
def test_what_is_no_address_is_an_option_error(uri: str) -> None:
    with pytest.raises(OptionError) as caught:
        parse_address(uri, "hf", None, None)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("uri", ["hf://org/name/../../x", "hf://org/name@../../x"])
def test_a_path_out_of_the_repository_is_refused(uri: str) -> None:
    with pytest.raises(PathError):
        parse_address(uri, "hf", None, None)


def test_two_revisions_are_refused_and_one_given_twice_is_not() -> None:
    with pytest.raises(OptionError, match="names revision"):
        parse_address("org/name@a", "hf", "b", None)
    assert parse_address("org/name@a", "hf", "a", None).revision == "a"


def test_a_plain_name_is_a_repository_only_where_no_such_path_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scheme_of("org/name") == scheme_of("org/name:Q4_K_M") == "hf"
    (tmp_path / "org").mkdir()
    assert scheme_of("org/name") == "file"


# -- plans ---------------------------------------------------------------------------------------


def test_a_plan_reads_headers_by_ranges_and_keeps_nothing(hub: Hub, tmp_path: Path) -> None:
    plan = loadkit.plan("org/toy")
    commit = hub.commit("org/toy")
    assert plan.ok and plan.source == f"hf://org/toy@{commit}"
    assert plan.bytes_fetched == sum(r.sent for r in hub.requests)
    assert all("range" in r.headers for r in hub.requests if "/resolve/" in r.path)
    assert not (tmp_path / "home").exists()
    assert [note.code for note in plan.notes if note.code == "DOWNLOAD"]


@pytest.mark.timeout(120)
def test_a_plan_of_a_70b_repository_fetches_under_a_hundredth_of_a_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "big"
    write_sparse_llama(folder, layers=80, hidden=8192, heads=64, ffn=28672, files=30)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size > 140e9
    with hub_server(org__big=folder) as hub:
        ask_hub(hub, tmp_path / "home", monkeypatch)
        document = spawn("plan", "hf://org/big", "--json").json()
        sent = sum(r.sent for r in hub.requests)
    assert document["ok"]
    assert sum(rank["bytes_fetched"] for rank in document["ranks"]) == sent > 0
    assert sent < size / 10_000


# -- loads ---------------------------------------------------------------------------------------


def test_a_load_is_what_the_folder_gives_and_the_next_one_fetches_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    result = loadkit.load("org/toy", load_config=LoadConfig(verify="digest"))
    same(result.model, tmp_path / "toy")
    assert result.report.source == f"hf://org/toy@{hub.commit('org/toy')}"
    assert result.report.bytes_fetched >= sum(
        path.stat().st_size for path in (tmp_path / "toy").iterdir()
    )
    assert result.report.verified["compared_bytes"]
    hub.requests.clear()
    again = loadkit.load("org/toy")
    assert [r.path for r in hub.requests] == ["/api/models/org/toy/revision/main"]
    assert again.report.bytes_fetched == 0
    same(again.model, tmp_path / "toy")


def test_a_streamed_load_keeps_no_file_and_reads_one_ranks_bytes(hub: Hub, tmp_path: Path) -> None:
    from loadkit.config import ParallelConfig

    same(loadkit.load_model("hf://org/toy", load_config=STREAM), tmp_path / "toy")
    assert not (tmp_path / "home").exists()
    parallel = ParallelConfig.for_rank(0, tp_size=2)
    mine = loadkit.load(tmp_path / "toy", parallel=parallel)
    result = loadkit.load("org/toy", parallel=parallel, load_config=STREAM)
    found, expected = result.model.state_dict(), mine.model.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_commit_that_the_cache_holds_whole_needs_no_request(hub: Hub) -> None:
    commit = hub.commit("org/toy")
    loadkit.load("org/toy")
    hub.requests.clear()
    loadkit.load(f"org/toy@{commit}")
    loadkit.load("org/toy", load_config=LoadConfig(revision=commit))
    assert hub.requests == []


def test_the_revision_is_asked_once_and_everything_after_is_of_that_commit(hub: Hub) -> None:
    first = hub.commit("org/toy")
    with open_source("org/toy", STREAM) as source:
        hub.answer = lambda request, name: None
        source.open("config.json").read(0, 10)
        assert {r.path.split("/resolve/")[1][:40] for r in hub.requests if "resolve" in r.path} == {
            first
        }
    assert hub.count(path="/revision/") == 1


def test_another_commit_in_an_answer_is_refused(hub: Hub) -> None:
    hub.answer = lambda request, name: name and ("headers", {"X-Repo-Commit": "f" * 40})
    with pytest.raises(DownloadError, match="sends commit"):
        loadkit.plan("org/toy")


def test_pages_of_a_listing_are_followed(hub: Hub) -> None:
    hub.page = 1
    assert loadkit.plan("org/toy").ok
    assert hub.count(path="/tree/") == len(hub.files("org/toy"))


def test_a_subfolder_is_named_in_the_address_or_as_an_option(hub: Hub, tmp_path: Path) -> None:
    write_llama(tmp_path / "toy" / "fp32", seed=5)
    for source, config in (("hf://org/toy/fp32", None), ("org/toy", LoadConfig(subfolder="fp32"))):
        same(loadkit.load_model(source, load_config=config), tmp_path / "toy" / "fp32")
    with pytest.raises(PathError, match="its folders: 'fp32'"):
        loadkit.plan("hf://org/toy/fp16")


def test_one_file_of_a_repository_can_be_the_source(hub: Hub, tmp_path: Path) -> None:
    save_file(llama_sd(seed=9), tmp_path / "toy" / "other.safetensors")
    plan = loadkit.plan("hf://org/toy/other.safetensors")
    assert plan.ok and plan.files == ("other.safetensors",)


def test_a_file_that_is_not_there_is_a_read_error(hub: Hub) -> None:
    with open_source("org/toy", LoadConfig()) as source:
        with pytest.raises(ReadError) as caught:
            source.open("tokenizer.json")
        assert caught.value.errno == 2
        with pytest.raises(PathError):
            source.open("../x")


# -- GGUF ----------------------------------------------------------------------------------------


def test_a_quantisation_after_the_colon_chooses_the_file(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    hub.repos["org/gguf"] = folder
    for name in ("toy-Q4_K_M.gguf", "toy-Q8_0.gguf", "mmproj-toy-Q8_0.gguf"):
        lone_llama(folder / name)
    for source in ("org/gguf:Q8_0", "hf://org/gguf:q8_0", "hf://org/gguf/toy-Q8_0.gguf"):
        plan = loadkit.plan(source)
        assert plan.ok and plan.files == ("toy-Q8_0.gguf",) and plan.load_format == "gguf"
    loaded = loadkit.load("org/gguf:Q8_0")
    assert loaded.report.source.endswith(":Q8_0")
    fetched = {r.path.rpartition("/")[2] for r in hub.requests if r.where == "cdn"}
    assert fetched == {"toy-Q8_0.gguf"}
    with pytest.raises(NoWeightsError, match=r"'toy-Q4_K_M', 'toy-Q8_0'"):
        loadkit.plan("org/gguf:Q2_K")
    with pytest.raises(NoWeightsError) as caught:
        loadkit.plan("org/gguf")
    assert caught.value.code == "E_AMBIGUOUS"


# -- one format only -----------------------------------------------------------------------------


@pytest.mark.parametrize("load_format", ["auto", "safetensors", "hf"])
def test_DSC_05_one_format_and_the_small_files_are_fetched(
    hub: Hub, tmp_path: Path, load_format: str
) -> None:
    folder = tmp_path / "toy"
    (folder / "pytorch_model.bin").write_bytes(b"never" * 1000)
    (folder / "training_args.bin").write_bytes(b"never" * 1000)
    (folder / "adapter_model.safetensors").write_bytes(b"never" * 1000)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "original").mkdir()
    (folder / "original" / "consolidated.00.pth").write_bytes(b"never" * 1000)
    result = loadkit.load("org/toy", load_format=load_format)
    assert result.report.load_format in ("safetensors", "hf")
    kept = {p.name for p in (tmp_path / "home").rglob("*") if "snapshots" in p.parts}
    assert "tokenizer_config.json" in kept
    for name in ("pytorch_model.bin", "training_args.bin", "consolidated.00.pth"):
        assert name not in kept and hub.bytes_of(name) == 0
    assert hub.bytes_of("adapter_model.safetensors") == 0


def test_ignored_patterns_are_not_fetched(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "toy" / "extra.json").write_text("{}")
    loadkit.load("org/toy", load_config=LoadConfig(ignore_patterns=("extra*",)))
    assert hub.bytes_of("extra.json") == 0


def test_SEC_03_code_of_a_repository_is_neither_fetched_nor_run(hub: Hub, tmp_path: Path) -> None:
    folder, ran = tmp_path / "evil", tmp_path / "RAN"
    folder.mkdir()
    hub.repos["org/evil"] = folder
    (folder / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    write_cfg(
        folder,
        architectures=["EvilForCausalLM"],
        auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"},
    )
    save_file(llama_sd(), folder / "model.safetensors")
    for call in (loadkit.plan, loadkit.load):
        with pytest.raises(LoadkitError, match=r"EvilForCausalLM.*auto_map.*never runs"):
            call("org/evil")
    loadkit.load("org/evil", architecture="LlamaForCausalLM")
    assert hub.count(path=".py") == 0
    assert not ran.exists()
    loadkit.load("org/evil", architecture="LlamaForCausalLM", trust_remote_code=True)
    assert not ran.exists()


# -- who may -------------------------------------------------------------------------------------


def shown(error: LoadkitError, caplog: pytest.LogCaptureFixture) -> str:
    """Everything that a user or a log could see of a failure."""
    return f"{error} {error.to_dict()} {error.__cause__!r} {caplog.text}"


@pytest.mark.parametrize("stream", [False, True])
def test_the_token_goes_to_the_hub_and_to_no_other_host(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    hub.gated.add("org/toy")
    ask_hub(hub, tmp_path / "home", monkeypatch, token=TOKEN)
    loadkit.load("org/toy", load_config=LoadConfig(stream=stream))
    sent = {(r.where, r.headers.get("authorization")) for r in hub.requests}
    assert sent == {("hub", f"Bearer {TOKEN}"), ("cdn", None)}


@pytest.mark.parametrize(
    ("token", "says"), [("", "hf auth login"), ("hf_wrongwrongwrongwrong", "that account")]
)
def test_a_gated_repository_says_what_to_do_and_never_the_token(
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    token: str,
    says: str,
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.gated.add("org/toy")
    ask_hub(hub, tmp_path / "home", monkeypatch, token=token)
    with pytest.raises(DownloadError, match="gated") as caught:
        loadkit.plan("org/toy")
    assert caught.value.code == "E_AUTH" and caught.value.exit_code == 3
    assert f"{hub.url}/org/toy" in str(caught.value) and says in str(caught.value)
    assert not token or token not in shown(caught.value, caplog)


def test_what_is_not_there_or_private_is_told_apart(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match="private, or does not exist") as caught:
        loadkit.plan("org/nothing")
    assert caught.value.code == "E_AUTH"
    with pytest.raises(PathError, match="no revision 'v9'"):
        loadkit.plan("org/toy@v9")
    ask_hub(hub, tmp_path / "home", monkeypatch, token=TOKEN)
    with pytest.raises(PathError, match="the hub has no repository 'org/nothing'"):
        loadkit.plan("org/nothing")


def test_a_refused_token_is_an_auth_error(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ask_hub(hub, tmp_path / "home", monkeypatch, token=TOKEN)
    said = {"X-Error-Message": f"Invalid credentials {TOKEN}"}
    hub.answer = lambda request, name: ("status", 401, said)
    with pytest.raises(DownloadError, match="refuses the token") as caught:
        loadkit.plan("org/toy")
    assert caught.value.code == "E_AUTH" and TOKEN not in shown(caught.value, caplog)


def test_options_that_a_hub_follows_are_not_idle(hub: Hub) -> None:
    config = LoadConfig(revision="main", network_timeout=5.0, network_deadline=60.0)
    assert loadkit.plan("org/toy", load_config=config).ok


def test_two_folders_for_downloads_are_refused(hub: Hub, tmp_path: Path) -> None:
    config = LoadConfig(cache_dir=str(tmp_path / "a"), download_dir=str(tmp_path / "b"))
    with pytest.raises(OptionError, match="leave out one"):
        loadkit.plan("org/toy", load_config=config)
    loadkit.load("org/toy", load_config=LoadConfig(download_dir=str(tmp_path / "b")))
    assert (tmp_path / "b" / "models--org--toy").is_dir() and not (tmp_path / "home").exists()
