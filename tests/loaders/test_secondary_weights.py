"""A model that is made of two checkpoints: the second one's tensors come under their prefix."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_shards, write_st
from helpers.loading_jobs import contents, place_of
from helpers.plain_ranks import PlainRanks
from helpers.two_checkpoints import ENCODER, PREFIX, WithEncoder, register
from helpers.web_server import WebServer
from loadkit.availability import READY, ask, availability_rows
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import FormatError, IntegrityError, LoadkitError, ModelError, PlanError
from loadkit_default.loader import DefaultModelLoader

SD = llama_sd()


@pytest.fixture(autouse=True)
def registered() -> None:
    register()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``text`` and ``encoder``, two checkpoints."""
    second = tmp_path / "encoder"
    second.mkdir()
    write_st(second / "model.safetensors", ENCODER)
    return made(tmp_path, model_or_path=str(second))


def made(folder: Path, **secondary: Any) -> Path:
    text = folder / "text"
    write_cfg(text, architectures=["WithEncoder"], secondary=secondary)
    write_st(text / "model.safetensors", SD)
    return folder


def load(place: Path, *, tp: int = 1, rank: int = 0, **config: Any) -> Any:
    return loadkit.load(
        place / "text",
        parallel=ParallelConfig(tp_size=tp, tp_rank=rank),
        load_config=LoadConfig(use_tqdm_on_load=False, **config),
    )


def check(model: torch.nn.Module, tp: int = 1, rank: int = 0) -> None:
    own = slice(rank * 24 // tp, (rank + 1) * 24 // tp)
    assert torch.equal(model.get_parameter("encoder.weight"), ENCODER["weight"][own])
    assert torch.equal(model.get_parameter("encoder.bias"), ENCODER["bias"][own])
    assert torch.equal(model.get_parameter("model.norm.weight"), SD["model.norm.weight"])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_other_checkpoints_tensors_are_planned_read_and_counted_like_its_own(
    tp: int, place: Path
) -> None:
    for rank in range(tp):
        result = load(place, tp=tp, rank=rank)
        check(result.model, tp, rank)
        plan = result.plan
        rows = {row.tensor: row for row in plan.rows if row.parameter == "encoder.weight"}
        assert list(rows) == ["encoder.weight"] and rows["encoder.weight"].exact == "exact"
        assert plan.files == ("model.safetensors", "secondary:encoder/model.safetensors")
        assert result.report.bytes_read == plan.bytes_to_read
        named = {row.tensor for row in plan.rows if row.tensor is not None}
        assert named == {*SD, "encoder.weight", "encoder.bias"}
    alone = load(place).plan
    own = sum(tensor.nbytes for tensor in (*SD.values(), *ENCODER.values()))
    assert alone.bytes_needed == own


def test_all_ranks_of_one_plan_see_the_same_files(place: Path) -> None:
    ranks = [ParallelConfig(tp_size=2, tp_rank=rank) for rank in (0, 1)]
    plans = list(loadkit.loader.plan_ranks(place / "text", ranks))
    assert plans[0].files == plans[1].files and all(plan.ok for plan in plans)


@pytest.mark.parametrize("shards", [True, False])
def test_the_other_checkpoint_may_have_an_index_or_be_one_file(
    shards: bool, tmp_path: Path
) -> None:
    second = tmp_path / "encoder"
    second.mkdir()
    if shards:
        write_shards(second, ENCODER, 2)
        made(tmp_path, model_or_path=str(second))
    else:
        write_st(second / "model.fp16.safetensors", ENCODER)
        made(tmp_path, model_or_path=str(second / "model.fp16.safetensors"))
    check(load(tmp_path).model)


def test_subfolder_patterns_and_fall_back_are_its_own(tmp_path: Path) -> None:
    second = tmp_path / "encoder" / "inner"
    second.mkdir(parents=True)
    torch.save(
        {"weight": ENCODER["weight"].t().contiguous().t(), "bias": ENCODER["bias"]},
        second / "pytorch_model.bin",
    )  # a transposed one is not simply its bytes in order
    write_st(second / "other.safetensors", {"weight": torch.zeros(1)})
    stated = {"model_or_path": str(second.parent), "subfolder": "inner"}
    made(tmp_path, **stated, allow_patterns_overrides=["*.bin"])
    result = load(tmp_path)
    check(result.model)
    assert {"encoder.weight", "encoder.bias"} <= {row.tensor for row in result.plan.rows}
    skipped = dict(result.plan.skipped_files)
    assert "secondary:encoder/other.safetensors" in skipped
    (second / "other.safetensors").unlink()
    made(tmp_path, **stated)
    check(load(tmp_path).model)
    made(tmp_path, **stated, fall_back_to_pt=False)
    with pytest.raises(LoadkitError, match="no weights"):
        load(tmp_path)


def test_a_tensor_that_it_lacks_is_missing_and_one_too_many_is_unexpected(place: Path) -> None:
    write_st(place / "encoder" / "model.safetensors", {"weight": ENCODER["weight"]})
    plan = loadkit.plan(place / "text")
    assert [(one.code, one.parameter) for one in plan.problems] == [("MISSING", "encoder.bias")]
    extra = {**ENCODER, "more": torch.zeros(3)}
    write_st(place / "encoder" / "model.safetensors", extra)
    plan = loadkit.plan(place / "text")
    assert [(one.code, one.tensor) for one in plan.problems] == [
        ("UNEXPECTED_TENSOR", "encoder.more")
    ]


def test_a_name_in_both_checkpoints_is_an_error_with_both_files(place: Path) -> None:
    write_st(place / "text" / "model.safetensors", {**SD, "encoder.bias": torch.zeros(24)})
    for call in (loadkit.plan, loadkit.load):
        with pytest.raises(FormatError) as caught:
            call(place / "text")
        assert (caught.value.code, caught.value.tensor) == ("E_DUPLICATE", "encoder.bias")
        assert caught.value.detail["files"] == [
            "model.safetensors",
            "secondary:encoder/model.safetensors",
        ]


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    made(tmp_path, model_or_path=str(tmp_path / "nowhere"))
    with pytest.raises(LoadkitError, match="nowhere"):
        load(tmp_path)


def test_an_option_that_does_nothing_for_it_is_refused(place: Path) -> None:
    made(place, model_or_path=str(place / "encoder"), revision="main")
    with pytest.raises(LoadkitError, match="revision='main'"):
        load(place)


@pytest.mark.parametrize("load_format", ["runai_streamer", "fastsafetensors"])
def test_a_format_that_is_a_reader_of_safetensors_reads_both(load_format: str, place: Path) -> None:
    states = [ask(row) for (name, _), row in availability_rows().items() if name == load_format]
    if not states or any(one.state != READY for one in states):
        pytest.skip(f"{load_format} cannot be used here")
    for tp, rank in ((1, 0), (2, 1)):
        result = load(place, tp=tp, rank=rank, load_format=load_format)
        check(result.model, tp, rank)


@pytest.mark.parametrize("load_format", ["mistral", "npcache"])
def test_a_format_that_reads_one_checkpoint_says_so(load_format: str, place: Path) -> None:
    loader = loadkit.tables.loaders.lookup(load_format)(LoadConfig(load_format=load_format))
    with pytest.raises(ModelError, match=f"'{load_format}' reads one") as caught:
        loader.attach([loadkit.WeightSource(model_or_path=str(place))])
    assert caught.value.code == "SECONDARY_WEIGHTS"


@pytest.mark.parametrize(
    "stated",
    [7, [7], "text", [None], [loadkit.WeightSource(model_or_path=b"a")]],  # type: ignore[arg-type]
)
def test_what_is_no_list_of_sources_is_refused(
    stated: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WithEncoder, "secondary_weights", stated)
    plan = loadkit.plan(place / "text")
    assert [one.code for one in plan.problems] == ["SECONDARY_WEIGHTS"]


def test_an_attribute_of_the_class_does_too(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = DefaultModelLoader.Source(model_or_path=str(place / "encoder"), prefix=PREFIX)
    monkeypatch.setattr(WithEncoder, "secondary_weights", (source,))
    check(load(place).model)
    monkeypatch.setattr(WithEncoder, "secondary_weights", None)
    with pytest.raises(PlanError, match=r"encoder\.weight"):
        load(place)


def test_it_is_verified_with_the_rest(place: Path) -> None:
    config = {"verify": "digest", "digest_store": "checkpoint", "alias": "never"}
    load(place, **config)
    result = load(place, **config)
    assert "secondary:encoder/model.safetensors" in json.dumps(result.report.to_dict())
    file = place / "encoder" / "model.safetensors"
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(IntegrityError) as caught:
        load(place, **config)
    assert caught.value.file == "secondary:encoder/model.safetensors"


def test_a_damaged_file_of_it_has_the_one_shape_of_error(place: Path) -> None:
    file = place / "encoder" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(LoadkitError) as caught:
        load(place)
    error = caught.value
    assert error.file and error.tensor and error.offset is not None and error.hint


def test_nothing_stays_open(place: Path) -> None:
    def opened() -> list[str]:
        links = (link for link in Path("/proc/self/fd").iterdir() if link.exists())
        return [str(link.readlink()) for link in links if str(place) in str(link.readlink())]

    model = load(place, alias="never").model
    loadkit.plan(place / "text")
    write_st(place / "text" / "model.safetensors", {**SD, "encoder.bias": torch.zeros(24)})
    with pytest.raises(FormatError):
        load(place)
    assert opened() == []
    check(model)


def test_a_model_of_dummy_weights_needs_no_second_checkpoint(place: Path) -> None:
    (place / "encoder" / "model.safetensors").unlink()
    result = loadkit.load(place / "text", load_format="dummy", load_config=LoadConfig())
    assert result.model.get_parameter("encoder.weight").shape == (24, 16)


def test_a_module_of_the_callers_has_its_second_checkpoint_too(place: Path) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(16, 24)
            self.encoder = torch.nn.Linear(16, 24)
            self.secondary_weights = [
                loadkit.WeightSource(model_or_path=str(place / "encoder"), prefix=PREFIX)
            ]

    first = {"proj.weight": torch.ones(24, 16), "proj.bias": torch.ones(24)}
    write_st(place / "text" / "model.safetensors", first)
    module = Own()
    loadkit.load_into(module, place / "text")
    assert torch.equal(module.encoder.weight, ENCODER["weight"])
    assert torch.equal(module.proj.bias, torch.ones(24))


# -- remote, and over ranks ----------------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    pytest.importorskip("loadkit_remote")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "web").mkdir()
    with WebServer(tmp_path / "web") as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("primary", ["local", "remote"])
def test_a_remote_one_is_planned_by_its_header_and_fetched_or_streamed(
    primary: str, stream: bool, web: WebServer, tmp_path: Path
) -> None:
    (web.folder / "encoder").mkdir()
    write_st(web.folder / "encoder" / "model.safetensors", ENCODER)
    made(web.folder, model_or_path=f"{web.url}/encoder/")
    made(tmp_path, model_or_path=f"{web.url}/encoder/")
    source: Any = tmp_path / "text" if primary == "local" else f"{web.url}/text/"
    config = LoadConfig(use_tqdm_on_load=False, stream=stream and primary == "remote")
    plan = loadkit.plan(source, load_config=config)
    assert plan.ok and plan.bytes_fetched > 0
    told = [note for note in plan.notes if note.code == "DOWNLOAD"]
    assert [note.hint is not None for note in told] == [primary == "remote"] * len(told)
    assert len(told) == (not config.stream)
    result = loadkit.load(source, load_config=config)
    check(result.model)
    assert result.report.bytes_read == plan.bytes_to_read
    assert web.sent("model.safetensors") > 0


def test_options_of_the_first_ones_source_are_no_business_of_a_local_one(
    web: WebServer, tmp_path: Path
) -> None:
    write_st(tmp_path / "model.safetensors", ENCODER)
    made(web.folder, model_or_path=str(tmp_path / "model.safetensors"))
    config = LoadConfig(use_tqdm_on_load=False, stream=True, network_timeout=7.0)
    check(loadkit.load(f"{web.url}/text/", load_config=config).model)


def test_ranks_that_load_together_share_it_too(place: Path) -> None:
    sizes = {"tp_size": 2}
    ranks = PlainRanks(2)
    try:
        found = ranks.run(
            "helpers.two_checkpoints:load",
            source=place / "text",
            sizes=sizes,
            load_config=LoadConfig(distribute="broadcast", rank_timeout=10),
        )
    finally:
        ranks.close()
    for rank, each in enumerate(found):
        alone = loadkit.load_model(place / "text", parallel=place_of(rank, sizes))
        assert each.get("contents") == contents(alone), each
    whole = loadkit.plan(place / "text").bytes_needed
    assert sum(each["report"]["bytes_read"] for each in found) == whole
