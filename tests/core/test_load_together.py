"""Ranks that load together, in processes looked after by nobody: they share, and fail as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from bisect import bisect
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import loadkit
from helpers.checkpoints import write_cfg, write_llama, write_st
from helpers.cold import evict
from helpers.digests import NAME, corrupt, write_manifest
from helpers.digests import place_of as place_of_tensor
from helpers.gguf_blocks import quantised
from helpers.gguf_files import LLAMA_KEYS, llama_tensors, write_gguf
from helpers.loading_jobs import contents, place_of
from helpers.plain_ranks import PerRank, PlainRanks
from helpers.tiny_families import write_family
from loadkit.base_loader import get_model_loader
from loadkit.build import build
from loadkit.config import LoadConfig, LoadkitConfig, ModelConfig, ParallelConfig
from loadkit.errors import OptionError
from loadkit.integrity.reader import VerifyingReader
from loadkit.manifest import MANIFEST
from loadkit.plan import make_plan
from loadkit.plan_together import needs_of_world, share_out
from loadkit.readers.prefetch import PrefetchingReader
from loadkit.readers.windows import merged
from loadkit.resolve import resolve
from loadkit.sources import open_source

WORLD = 4
TP4: dict[str, int] = {"tp_size": WORLD}
SHARED = LoadConfig(distribute="broadcast", rank_timeout=10)
VERIFIED = LoadConfig(distribute="broadcast", rank_timeout=10, verify="digest")
EACH = LoadConfig(rank_timeout=10, alias="never", reader="pread")
SIZES: dict[str, Any] = {
    "hidden": 64, "heads": 8, "kv_heads": 2, "ffn": 96, "vocab": 41, "layers": 3,
}  # fmt: skip
LOAD, FAIL = "helpers.loading_jobs:load", "helpers.loading_jobs:load_and_fail"


@pytest.fixture(scope="module")
def ranks() -> Iterator[PlainRanks]:
    started = PlainRanks(WORLD)
    yield started
    started.close()


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of several formats and shapes, by what is in them."""
    root = tmp_path_factory.mktemp("sources")
    state = write_llama(root / "llama", shards=2, **SIZES)
    tied = {**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}
    write_cfg_like(root / "llama", root / "tied", tie_word_embeddings=True)
    write_st(root / "tied/model.safetensors", tied)
    (root / "gguf").mkdir()
    plain = llama_tensors(hidden=128, heads=4, kv=4, ffn=256, vocab=44)
    blocks = quantised(plain, lambda name: "Q8_0" if "norm" not in name else None)
    sizes = {"embedding_length": 128, "attention.head_count_kv": 4, "feed_forward_length": 256}
    keys = dict(LLAMA_KEYS) | {f"llama.{name}": value for name, value in sizes.items()}
    write_gguf(root / "gguf/model.gguf", blocks, list(keys.items()))
    return {
        "llama": root / "llama",
        "tied": root / "tied",
        "gguf": root / "gguf",
        "moe": write_family(root / "moe", "qwen3_moe"),
    }


def write_cfg_like(source: Path, folder: Path, **changes: Any) -> None:
    config = json.loads((source / "config.json").read_text())
    write_cfg(folder, **{**config, **changes})


def same_for_all(found: list[dict[str, Any] | None], *keys: str) -> list[Any]:
    """The values of some keys, which are equal on every rank that answered."""
    told = [[each[key] for key in keys] for each in found if each is not None]
    assert all(each == told[0] for each in told), told
    return told[0]


# -- sharing what is read -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "sizes", "options"),
    [
        pytest.param("llama", TP4, {}, id="columns and rows"),
        pytest.param("llama", {"tp_size": 2, "dp_size": 2}, {"dtype": "bfloat16"}, id="casts"),
        pytest.param("llama", {"dp_size": 4}, {}, id="replicas"),
        pytest.param("llama", {"pp_size": 2, "tp_size": 2}, {}, id="stages"),
        pytest.param("moe", {**TP4, "ep_size": 4}, {}, id="experts"),
        pytest.param("gguf", TP4, {"dtype": "bfloat16"}, id="decoded blocks"),
        pytest.param("tied", TP4, {}, id="compared"),
    ],
)
@pytest.mark.parametrize("round_bytes", [0, 1 << 14], ids=["one round", "many rounds"])
def test_ranks_read_each_byte_once_and_hold_what_each_would_read_alone(
    ranks: PlainRanks,
    sources: dict[str, Path],
    source: str,
    sizes: dict[str, int],
    options: dict[str, Any],
    round_bytes: int,
) -> None:
    found = ranks.run(
        LOAD, source=sources[source], sizes=sizes, load_config=SHARED, round_bytes=round_bytes,
        **options,
    )  # fmt: skip
    union, needed = 0, set()
    for rank, each in enumerate(found):
        alone = loadkit.load(sources[source], parallel=place_of(rank, sizes), **options)
        assert each["contents"] == contents(alone.model)
        report = each["report"]
        assert each["planned"] == report["bytes_read"]
        assert report["aliased_bytes"] == 0
        union += report["bytes_read"]
        # never more than what it needs, and so no whole tensors
        assert report["bytes_received"] <= alone.plan.bytes_to_read
        needed.add(alone.plan.bytes_needed)
        assert each["threads"] == 0
    (group,) = same_for_all(found, "group")
    assert union == group >= max(needed)
    assert sum(each["report"]["bytes_sent"] for each in found) == sum(
        each["report"]["bytes_received"] for each in found
    )


def test_all_ranks_of_a_plain_layout_read_the_whole_checkpoint_once(
    ranks: PlainRanks, sources: dict[str, Path]
) -> None:
    found = ranks.run(LOAD, source=sources["llama"], sizes=TP4, load_config=SHARED)
    whole = loadkit.plan(sources["llama"]).bytes_needed
    assert sum(each["report"]["bytes_read"] for each in found) == whole
    sizes = [each["report"]["bytes_read"] for each in found]
    assert max(sizes) - min(sizes) <= 3 * 4096


@pytest.mark.parametrize("reader", ["mmap", "direct"])
def test_any_reader_reads_for_all(ranks: PlainRanks, sources: dict[str, Path], reader: str) -> None:
    config = LoadConfig(distribute="broadcast", reader=reader)
    found = ranks.run(LOAD, source=sources["llama"], sizes=TP4, load_config=config)
    for rank, each in enumerate(found):
        assert each["contents"] == contents(
            loadkit.load_model(sources["llama"], parallel=place_of(rank, TP4))
        )
        assert each["planned"] == each["report"]["bytes_read"]
        assert "no parameter is a view of a file" in each["report"]["reader_why"]


def test_a_plan_alone_says_what_each_rank_will_read(
    ranks: PlainRanks, sources: dict[str, Path]
) -> None:
    found = ranks.run(LOAD, source=sources["llama"], sizes=TP4, load_config=SHARED)
    for rank, each in enumerate(found):
        plan = loadkit.plan(
            sources["llama"],
            parallel=place_of(rank, TP4),
            load_config=LoadConfig(distribute="broadcast"),
        )
        assert plan.bytes_to_read == each["report"]["bytes_read"]
        assert (plan.distribute, plan.group_bytes_to_read) == ("broadcast", each["group"])
        assert plan.requests == each["report"]["requests"]
        assert loadkit.LoadPlan.from_dict(plan.to_dict()).group_bytes_to_read == each["group"]


@pytest.mark.parametrize("options", [{"distribute": "broadcast"}, {"rank_timeout": 3.0}])
def test_options_of_a_group_are_refused_without_one(
    sources: dict[str, Path], options: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))}.*process_group"):
        loadkit.load(sources["llama"], load_config=LoadConfig(**options))


@pytest.mark.parametrize("options", [{"distribute": "broadcast"}, {"rank_timeout": 3.0}])
def test_a_bundle_is_loaded_by_one_rank(sources: dict[str, Path], options: dict[str, Any]) -> None:
    quiet = LoadConfig(use_tqdm_on_load=False)
    for given, good in ((quiet, True), (replace(quiet, **options), False)):
        with open_source(sources["llama"], given) as source:
            model_config = ModelConfig.from_source(source, load_config=given)
        config = LoadkitConfig(model_config, given, ParallelConfig())
        named = get_model_loader(replace(given, load_format="safetensors"))
        for load in (loadkit.get_model, named.load_model):
            if good:
                assert contents(load(config)) == contents(loadkit.load_model(sources["llama"]))
                continue
            with pytest.raises(OptionError, match=f"{next(iter(options))}.*process_group"):
                load(config)


def test_what_is_no_process_group_is_refused(sources: dict[str, Path]) -> None:
    with pytest.raises(OptionError, match=r"process_group is int; accepted: a torch\.distributed"):
        loadkit.load(sources["llama"], process_group=4)


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a file of 5 MB, and a manifest with every tensor's digest."""
    folder = tmp_path_factory.mktemp("listed") / "llama"
    write_llama(folder, hidden=128, heads=8, kv_heads=4, ffn=512, vocab=3000)
    write_manifest(folder, tensors=True)
    return folder


@pytest.mark.parametrize("round_bytes", [0, 1 << 18], ids=["one round", "many rounds"])
def test_each_rank_verifies_what_it_reads_for_all(
    ranks: PlainRanks, listed: Path, round_bytes: int
) -> None:
    found = ranks.run(LOAD, source=listed, sizes=TP4, load_config=VERIFIED, round_bytes=round_bytes)
    for rank, each in enumerate(found):
        alone = loadkit.load_model(listed, parallel=place_of(rank, TP4))
        assert each["contents"] == contents(alone)
        report = each["report"]
        assert each["planned"] == report["bytes_read"]
        assert report["verified"]["files"] == {NAME: MANIFEST}
        assert report["verified"]["compared_bytes"] > 0
    (group,) = same_for_all(found, "group")
    assert sum(each["report"]["bytes_read"] for each in found) == group
    whole = sum(each["report"]["verified"]["compared_bytes"] for each in found)
    assert whole >= loadkit.plan(listed).bytes_needed


def test_what_is_brought_ahead_is_what_this_rank_reads(listed: Path) -> None:
    config = LoadConfig(
        distribute="broadcast", verify="digest", safetensors_load_strategy="prefetch"
    )
    options: dict[str, Any] = {"parallel": place_of(0, TP4), "load_config": config}
    with closing(resolve(listed, **options)) as job:
        planned = make_plan(job, build(job))
        share_out(job, planned, needs_of_world(listed, options, job, planned))
        reader, share = planned.reader, planned.share
        assert isinstance(reader, VerifyingReader)
        assert isinstance(reader.inner, PrefetchingReader)
        assert share is not None
        ((_, ranges),) = reader.inner._small.values()
        mine = [segment for _, segment in share.shares.part(0, 0)]
        brought = sum(
            max(0, min(end, one.end) - max(start, one.start))
            for start, end in merged(ranges)
            for one in mine
        )
        assert brought == sum(one.end - one.start for one in mine)
        reader.close()


@pytest.mark.parametrize("who", [0, 3])
def test_fault_28_a_bit_that_turned_in_one_ranks_file_is_every_ranks_error(
    ranks: PlainRanks, listed: Path, tmp_path: Path, who: int
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(listed, bad)
    # What rank 0 reads of the one round is its first quarter, what rank 3 reads is its last.
    tensor = "lm_head.weight" if who == 0 else "model.layers.1.self_attn.q_proj.weight"
    offset, _ = place_of_tensor(bad, tensor)
    corrupt(bad / NAME, offset + 70_000 if who == 0 else offset + 40_003)
    folders = [bad if rank == who else listed for rank in range(WORLD)]
    found = ranks.run(LOAD, source=PerRank(folders), sizes=TP4, load_config=VERIFIED)
    told = same_for_all(found, "type", "code", "file", "tensor", "offset", "rank")
    assert told == ["IntegrityError", "E_DIGEST", NAME, tensor, offset, who]
    assert max(each["seconds"] for each in found) < 5
    assert [each["threads"] for each in found] == [0] * WORLD


@pytest.mark.parametrize("reader", [1, 2])
def test_who_reads_what_only_others_need_verifies_it(
    ranks: PlainRanks, tmp_path: Path, reader: int
) -> None:
    """Of two stages, each with a replica: rank 1 reads of the first, rank 2 of the last."""
    target = tmp_path / "stages"
    sizes = {"pp_size": 2, "dp_size": 2}
    write_llama(tmp_path / "one", ffn=960, hidden=64, vocab=40)
    loadkit.convert(tmp_path / "one", target, max_shard_bytes=1 << 17, names="checkpoint")
    found = ranks.run(LOAD, source=target, sizes=sizes, load_config=VERIFIED)
    (group,) = same_for_all(found, "group")
    assert sum(each["report"]["bytes_read"] for each in found) == group
    assert all(each["planned"] == each["report"]["bytes_read"] for each in found)

    shards = sorted(target.glob("*.safetensors"))
    ends = list(accumulate(shard.stat().st_size for shard in shards))
    middle = ends[-1] * (2 * reader + 1) // 8  # of the quarter that the rank reads
    shard = shards[bisect(ends, middle)]
    corrupt(shard, shard.stat().st_size // 2)
    found = ranks.run(LOAD, source=target, sizes=sizes, load_config=VERIFIED)
    assert same_for_all(found, "code", "file", "rank") == ["E_DIGEST", shard.name, reader]


def test_a_module_of_ones_own_is_filled_together(
    ranks: PlainRanks, sources: dict[str, Path]
) -> None:
    found = ranks.run("helpers.loading_jobs:load_into", source=sources["llama"], load_config=SHARED)
    for each in found:
        assert each["good"]
    union = sum(each["bytes_read"] for each in found)
    assert union == loadkit.plan(sources["llama"]).bytes_needed


# -- failing as one -------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SHARED, EACH], ids=["sharing", "each for itself"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        pytest.param("io", ("ReadError", "E_IO", "rank 1 of 4: the disk is on strike"), id="io"),
        pytest.param("memory", ("ResourceError", "E_MEMORY", "rank 1 of 4: out of memory: no more"),
                     id="fault_32"),
    ],
)  # fmt: skip
def test_a_failed_read_of_one_rank_is_every_ranks_error(
    ranks: PlainRanks,
    sources: dict[str, Path],
    config: LoadConfig,
    how: str,
    told: tuple[str, str, str],
) -> None:
    found = ranks.run(
        FAIL, source=sources["llama"], sizes=TP4, load_config=config, who=1, how=how,
        at=2 if config is SHARED else 1, round_bytes=1 << 14,
    )  # fmt: skip
    assert tuple(same_for_all(found, "type", "code", "message")) == told
    if how == "io":
        where = same_for_all(found, "file", "tensor", "offset", "rank")
        assert where == ["model.safetensors", "model.norm.weight", 4711, 1]
    assert max(each["seconds"] for each in found) < 5
    assert [each["threads"] for each in found] == [0] * WORLD


@pytest.mark.parametrize("config", [SHARED, EACH], ids=["sharing", "each for itself"])
def test_fault_33_an_interrupt_of_one_rank_ends_all(
    ranks: PlainRanks, sources: dict[str, Path], config: LoadConfig
) -> None:
    found = ranks.run(
        FAIL, source=sources["llama"], sizes=TP4, load_config=config, who=3, how="interrupted",
        at=2 if config is SHARED else 1, round_bytes=1 << 14,
    )  # fmt: skip
    assert found[3]["type"] == "KeyboardInterrupt"
    assert same_for_all(found[:3], "message") == ["rank 3 of 4: KeyboardInterrupt: "]
    assert max(each["seconds"] for each in found) < 5
    assert [each["threads"] for each in found] == [0] * WORLD


@pytest.mark.parametrize("fault", ["torn header", "cut"])
def test_fault_28_one_ranks_corrupt_shard_is_every_ranks_error(
    ranks: PlainRanks, sources: dict[str, Path], tmp_path: Path, fault: str
) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(sources["llama"], bad)
    shard = bad / "model-00002-of-00002.safetensors"
    if fault == "cut":
        os.truncate(shard, shard.stat().st_size - 8)
    else:
        with shard.open("r+b") as file:
            file.write(b"\xff" * 16)
    folders = PerRank([sources["llama"], bad, sources["llama"], sources["llama"]])
    found = ranks.run(LOAD, source=folders, sizes=TP4, load_config=EACH)
    code, message, file, rank = same_for_all(found, "code", "message", "file", "rank")
    assert code == ("E_LAYOUT" if fault == "cut" else "E_HEADER")
    assert message.startswith("rank 1 of 4: ")
    assert (file, rank) == (shard.name, 1)
    assert max(each["seconds"] for each in found) < 5


@pytest.mark.parametrize("config", [SHARED, EACH], ids=["sharing", "each for itself"])
def test_fault_31_one_rank_sees_another_file(
    ranks: PlainRanks, sources: dict[str, Path], tmp_path: Path, config: LoadConfig
) -> None:
    other = tmp_path / "other"
    shutil.copytree(sources["llama"], other)
    shard = other / "model-00001-of-00002.safetensors"
    changed(shard)
    folders = PerRank([sources["llama"], sources["llama"], other, sources["llama"]])
    found = ranks.run(LOAD, source=folders, sizes=TP4, load_config=config)
    code, message, file, rank = same_for_all(found, "code", "message", "file", "rank")
    assert (code, file, rank) == ("E_RANK_MISMATCH", shard.name, 2)
    assert message.startswith(f"rank 2 of 4 sees another {shard.name} than ranks 0, 1 and 3 (")


def changed(shard: Path) -> None:
    """Other weights in a file of one size and one header."""
    from safetensors.torch import load_file

    size = shard.stat().st_size
    write_st(shard, {name: t + 1 for name, t in load_file(shard).items()}, {"format": "pt"})
    assert shard.stat().st_size == size


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        pytest.param({"sizes": PerRank([TP4, TP4, TP4, {"dp_size": 4}])}, "topology"),
        pytest.param({"dtype": PerRank(["auto"] * 3 + ["bfloat16"])}, "dtype"),
        pytest.param({"hf_overrides": PerRank([{}] * 3 + [{"rms_norm_eps": 1}])}, "config"),
        pytest.param({"load_config": PerRank([SHARED] * 3 + [EACH])}, "options"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_ranks_that_mean_something_else_are_told(
    ranks: PlainRanks, sources: dict[str, Path], change: dict[str, Any], differs: str
) -> None:
    arguments = {"sizes": TP4, "load_config": EACH, **change}
    found = ranks.run(LOAD, source=sources["llama"], **arguments)
    code, message, detail = same_for_all(found, "code", "message", "detail")
    assert code == "E_RANK_MISMATCH"
    assert f"rank 3 of 4 sees another {differs} than ranks 0, 1 and 2" in message
    assert (detail["differs"], detail["ranks"]) == (differs, [3])


def test_places_that_two_ranks_take_are_told(ranks: PlainRanks, sources: dict[str, Path]) -> None:
    found = ranks.run(
        "helpers.loading_jobs:load_as", source=sources["llama"], place=PerRank([0, 1, 1, 3])
    )
    code, message = same_for_all(found, "code", "message")
    assert code == "E_RANK_MISMATCH"
    assert "ranks 1 and 2 both are rank 1 of the layout" in message


def test_the_group_is_as_it_was_after_a_failed_load(
    ranks: PlainRanks, sources: dict[str, Path]
) -> None:
    arguments: dict[str, Any] = {"source": sources["llama"], "sizes": TP4, "load_config": SHARED}
    found = ranks.run(FAIL, who=1, how="io", at=1, **arguments)
    assert same_for_all(found, "code") == ["E_IO"]
    assert ranks.run("helpers.loading_jobs:add_up") == [float(WORLD)] * WORLD
    assert all("contents" in each for each in ranks.run(LOAD, **arguments))


# -- ranks that are gone --------------------------------------------------------------------------


def run_to_the_end(
    who: int, how: str, config: LoadConfig, source: Path, *, own_store: bool = True
) -> list[dict[str, Any] | None]:
    """Four new ranks of which one goes away in its read."""
    started = PlainRanks(WORLD, own_store=own_store)
    try:
        started.run(LOAD, source=source, sizes=TP4, load_config=config)
        return started.run(
            FAIL, gone=[who], who=who, how=how, source=source, sizes=TP4, load_config=config,
            round_bytes=1 << 14, at=2 if config.distribute else 1, timeout=60,
        )  # fmt: skip
    finally:
        pids = started.pids
        started.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)


def is_told(found: list[dict[str, Any] | None], who: int, words: str, timeout: float) -> None:
    assert found[who] is None
    kind, code, message, rank = same_for_all(found, "type", "code", "message", "rank")
    assert (kind, code, rank) == ("DistributedError", "E_RANK", who)
    assert message.startswith(f"rank {who} of {WORLD}: ")
    assert words in message
    assert max(each["seconds"] for each in found if each) < timeout + 5


PATIENCE = 3.0
GONE = {
    "killed": "it has ended",
    "crashes": "it has ended",
    "stopped": "gave no sign of life for 3",
}


@pytest.mark.parametrize("how", [pytest.param("stopped", id="fault_29-SIGSTOP")])
def test_a_stopped_rank_is_noticed_by_its_silence(sources: dict[str, Path], how: str) -> None:
    config = LoadConfig(distribute="broadcast", rank_timeout=PATIENCE)
    found = run_to_the_end(2, how, config, sources["llama"])
    is_told(found, 2, GONE[how], PATIENCE)
    assert [each["threads"] for each in found if each] == [0] * (WORLD - 1)


@pytest.mark.slow
@pytest.mark.parametrize("distribute", ["broadcast", None])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("killed", id="fault_29-SIGKILL"),
        pytest.param("crashes", id="fault_29-SIGSEGV"),
        pytest.param("stopped", id="fault_29-SIGSTOP"),
    ],
)
@pytest.mark.parametrize("own_store", [True, False], ids=["starter's store", "rank 0's store"])
def test_a_rank_that_is_gone_is_noticed(
    sources: dict[str, Path], how: str, distribute: str | None, own_store: bool
) -> None:
    reading: dict[str, Any] = {} if distribute else {"alias": "never", "reader": "pread"}
    config = LoadConfig(distribute=distribute, rank_timeout=PATIENCE, **reading)
    found = run_to_the_end(2, how, config, sources["llama"], own_store=own_store)
    is_told(found, 2, GONE[how].removeprefix("it "), PATIENCE)
    assert [each["threads"] for each in found if each] == [0] * (WORLD - 1)


@pytest.mark.slow
@pytest.mark.parametrize("distribute", ["broadcast", None])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_takes_the_store_along_is_noticed(
    sources: dict[str, Path], how: str, distribute: str | None
) -> None:
    reading: dict[str, Any] = {} if distribute else {"alias": "never", "reader": "pread"}
    config = LoadConfig(distribute=distribute, rank_timeout=PATIENCE, **reading)
    found = run_to_the_end(0, how, config, sources["llama"], own_store=False)
    told = {"killed": "its process has ended", "stopped": "its process is stopped"}
    answers = [
        {**each, "message": each["message"].partition(";")[0]} if each else each for each in found
    ]
    is_told(answers, 0, told[how], PATIENCE)


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(sources: dict[str, Path]) -> None:
    started = PlainRanks(WORLD)
    try:
        started.run(LOAD, source=sources["llama"], sizes=TP4, load_config=EACH)
        os.kill(started.pids[3], signal.SIGSTOP)
        config = LoadConfig(rank_timeout=PATIENCE)
        found = started.run(LOAD, gone=[3], source=sources["llama"], sizes=TP4, load_config=config)
        (message,) = {each["message"].partition(" within")[0] for each in found if each}
        assert message.endswith("rank 3 of 4 did not come to the load")
    finally:
        started.close()


@pytest.mark.slow
def test_fault_31_a_bind_mount_that_one_rank_has(sources: dict[str, Path], tmp_path: Path) -> None:
    good = sources["llama"] / "model-00001-of-00002.safetensors"
    other = tmp_path / good.name
    shutil.copy(good, other)
    changed(other)
    started = PlainRanks(WORLD, mounts={2: (other, good)})
    try:
        found = started.run(LOAD, source=sources["llama"], sizes=TP4, load_config=EACH)
    finally:
        started.close()
    code, file, rank = same_for_all(found, "code", "file", "rank")
    assert (code, file, rank) == ("E_RANK_MISMATCH", good.name, 2)


# -- a checkpoint that is not in memory ------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About half a GiB of bfloat16."""
    folder = tmp_path_factory.mktemp("large")
    write_llama(
        folder, shards=2, dtype=torch.bfloat16, hidden=2048, heads=16, kv_heads=8, ffn=5632,
        vocab=16384, layers=4,
    )  # fmt: skip
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("distribute", [None, "broadcast"])
def test_a_cold_checkpoint_comes_from_the_disk_once(
    large: Path, tp: int, distribute: str | None
) -> None:
    files = sorted(large.glob("*.safetensors"))
    started = PlainRanks(tp)
    config = LoadConfig(distribute=distribute, rank_timeout=60, use_tqdm_on_load=False)
    arguments = {"source": large, "sizes": {"tp_size": tp}, "load_config": config}
    try:
        started.run("helpers.loading_jobs:load_cold", **arguments)  # what a first load imports
        evict(*files)
        found = started.run("helpers.loading_jobs:load_cold", **arguments)
    finally:
        started.close()
    size = sum(file.stat().st_size for file in files)
    taken = sum(each["disk_bytes"] for each in found)
    if not taken:
        pytest.skip("reads of this disk are not counted")
    assert 0.9 * size <= taken <= 1.02 * size
    for each in found:
        assert each["anonymous_bytes"] <= 1.05 * each["parameter_bytes"] + (64 << 20)
    if distribute:
        assert sum(each["bytes_read"] for each in found) == found[0]["group"]


# -- under a process that looks after its ranks ---------------------------------------------------


def test_a_rank_started_by_loadkit_has_the_group_and_its_error_names_one_rank(
    sources: dict[str, Path],
) -> None:
    from loadkit.launch import run_ranks

    with pytest.raises(loadkit.errors.ReadError) as caught:
        run_ranks(
            "helpers.loading_jobs:load_in_rank",
            {"source": str(sources["llama"]), "who": 1},
            [place_of(rank, {"tp_size": 2}) for rank in range(2)],
        )
    assert str(caught.value).startswith("rank 1 of 2: the disk is on strike")
    assert "rank 0" not in str(caught.value)
    assert torch.distributed.is_initialized() is False


@pytest.mark.slow
def test_the_command_line_loads_together(sources: dict[str, Path]) -> None:
    command = [sys.executable, "-m", "loadkit.cli", "load", str(sources["llama"]), "--json"]
    command += ["--tp", "2", "--set", "distribute=broadcast"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [rank["tp_rank"] for rank in found["ranks"]] == [0, 1]
    whole = loadkit.plan(sources["llama"]).bytes_needed
    assert sum(rank["bytes_read"] for rank in found["ranks"]) == whole
    assert found["load_format"] == "safetensors"


@pytest.mark.slow
def test_the_command_line_tells_the_one_cause(sources: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(sources["llama"], bad)
    shard = bad / "model-00002-of-00002.safetensors"
    with shard.open("r+b") as file:
        file.write(b"\xff" * 16)
    command = [sys.executable, "-m", "loadkit.cli", "load", str(bad), "--tp", "2"]
    done = subprocess.run(
        [*command, "--set", "distribute=broadcast"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines[0].startswith("error: E_HEADER: rank ")
    assert done.stderr.count("E_HEADER") == 1
    assert shard.name in done.stderr


def test_the_command_line_plans_a_whole_layout_at_once(sources: dict[str, Path]) -> None:
    from click.testing import CliRunner

    from loadkit.cli.app import cli

    command = ["plan", str(sources["llama"]), "--tp", "4", "--set", "distribute=broadcast"]
    found = json.loads(CliRunner().invoke(cli, [*command, "--json"]).stdout)
    reads = [rank["bytes_to_read"] for rank in found["ranks"]]
    assert found["distribute"] == "broadcast"
    assert sum(reads) == found["group_bytes_to_read"] == loadkit.plan(sources["llama"]).bytes_needed
