"""Parameters put together from pages of files: without a copy, and without a difference."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_index, write_st
from helpers.extents import content
from loadkit import page_runs
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import IntegrityError, TruncatedError
from loadkit.page_runs import SHORTEST, pages_of
from loadkit.readers import mmap as mmap_reader
from loadkit.readers import pages as reader_pages
from loadkit.readers.mmap import MmapReader
from loadkit.readers.pages import PAGE, can_put_pages, put_pages, reserve, runs_held
from loadkit.sources.local_file import LocalFile
from loadkit.tensor_info import TensorInfo
from loadkit.tracing.pairing import Strip
from loadkit.tracing.storage import FileLeaf

pytestmark = pytest.mark.skipif(not can_put_pages(), reason="pages are put on 64-bit Linux only")

SIZES: dict[str, int] = {"hidden": 512, "heads": 8, "kv_heads": 4, "ffn": 1024, "vocab": 1000}
LAYERS = 3
FUSED = LAYERS * (1024 + 2 * 1024) * 512 * 4  # bytes of qkv and gate_up


def write(folder: Path, shards: int = 1, **metadata: str) -> Path:
    """A Llama whose fused parts lie apart: names are sorted, and dealt over files."""
    write_cfg(
        folder, hidden_size=512, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=1024, vocab_size=1000, num_hidden_layers=LAYERS,
    )  # fmt: skip
    state = llama_sd(layers=LAYERS, **SIZES)
    names = sorted(state)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[shard::shards]}
        # Headers of other lengths: the files' tensors lie differently in their pages.
        write_st(folder / file, part, {"format": "pt", "x": "-" * (8 * shard), **metadata})
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llama"))


def load(folder: Path, tp: int = 1, rank: int = 0, **options: Any) -> Any:
    config = LoadConfig(use_tqdm_on_load=False, **options)
    return loadkit.load(
        folder, parallel=ParallelConfig(tp_size=tp, tp_rank=rank), load_config=config
    )


def same(one: Any, other: Any) -> bool:
    theirs = dict(other.model.named_parameters())
    return all(torch.equal(p, theirs[name]) for name, p in one.model.named_parameters())


def counted(result: Any) -> bool:
    plan, report = result.plan, result.report
    read, aliased = plan.bytes_to_read, plan.aliased_bytes
    return (read, aliased) == (report.bytes_read, report.aliased_bytes)


# -- memory --------------------------------------------------------------------------------------


def mappings_of(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_memory_holds_pages_of_files_beside_its_own_and_gives_all_back(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(data := content(8 * PAGE))
    file = LocalFile("bytes", str(path))
    memory = reserve(5 * PAGE, phase=100)
    assert memory.data_ptr() % PAGE == 100
    first = PAGE - 100  # where a page begins
    into = memory[first : first + 2 * PAGE]
    assert put_pages(into, file.fileno(), 3 * PAGE) == 0
    assert mappings_of(path) == 1
    assert bytes(into.numpy()) == data[3 * PAGE : 5 * PAGE]
    assert not memory[:first].any()
    assert not memory[first + 2 * PAGE :].any()
    memory.fill_(7)  # private
    assert path.read_bytes() == data
    file.close()
    part = memory[-1:]
    del memory, into
    gc.collect()
    assert mappings_of(path) == 1  # somebody holds a part
    del part
    gc.collect()
    assert mappings_of(path) == 0


def test_a_refusal_is_a_number_and_leaves_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(PAGE))
    memory = reserve(2 * PAGE, 0).fill_(3)
    with path.open("rb") as file:
        assert put_pages(memory[:PAGE], file.fileno(), 1) == errno.EINVAL  # no page begins there
    assert put_pages(memory[:PAGE], 10_000, 0) == errno.EBADF
    assert bool((memory == 3).all())


def test_a_refusal_that_took_the_memory_away_gives_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(PAGE))
    memory = reserve(3 * PAGE, 0).fill_(3)
    system, asked = reader_pages._mmap, []

    def as_older_kernels(address: int, nbytes: int, *rest: int) -> Any:
        asked.append(address)
        if len(asked) > 1:
            return system(address, nbytes, *rest)
        reader_pages._munmap(address, nbytes)
        return system(address, nbytes, *rest[:-1], 1)  # EINVAL

    monkeypatch.setattr(reader_pages, "_mmap", as_older_kernels)
    with path.open("rb") as file:
        assert put_pages(memory[PAGE : 2 * PAGE], file.fileno(), 0) == errno.EINVAL
    assert memory.view(3, PAGE).unique(dim=1).flatten().tolist() == [3, 0, 3]


def test_memory_that_cannot_be_had_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = reserve(3 * PAGE, 0)
    system = reader_pages._mmap

    def refuse(address: int, nbytes: int, *rest: int) -> Any:
        reader_pages._munmap(address, nbytes)
        return system(address, 0, *rest)  # no mapping is that short

    monkeypatch.setattr(reader_pages, "_mmap", refuse)
    with pytest.raises(MemoryError):
        put_pages(memory[PAGE : 2 * PAGE], -1, 0)


def test_whole_pages_only(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(2 * PAGE))
    file = LocalFile("bytes", str(path))
    reader = MmapReader(LoadConfig())
    memory = reserve(3 * PAGE, 0).fill_(3)
    for offset, start, nbytes in ((0, 0, PAGE - 1), (0, 1, PAGE), (1, 0, PAGE)):
        with pytest.raises(ValueError, match="no whole pages"):
            reader.overlay(file, offset, memory[start : start + nbytes])
    assert bool((memory == 3).all())
    reader.close()
    file.close()


# -- which pages ---------------------------------------------------------------------------------


def pieces(parts: list[tuple[int, int]]) -> list[tuple[FileLeaf, Strip]]:
    """Runs (gap in the file before it, bytes), one after another in memory, of one file."""
    file: Any = type("File", (), {"name": "f", "size": 1 << 40})()
    out, offset, target = [], 0, 0
    for number, (gap, nbytes) in enumerate(parts):
        offset += gap
        info = TensorInfo(f"t{number}", file, offset, nbytes, (nbytes,), "U8")
        leaf = FileLeaf(info, info.name, info.shape, torch.uint8)
        out.append((leaf, Strip(0, target, nbytes, 1, nbytes, nbytes)))
        offset, target = offset + nbytes, target + nbytes
    return out


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(0, 3 * PAGE), st.integers(1, SHORTEST + 4 * PAGE)),
        min_size=1,
        max_size=4,
    )
)
def test_every_byte_is_mapped_or_read_once_and_from_its_place(parts: list[tuple[int, int]]) -> None:
    strips = pieces(parts)
    total = sum(nbytes for _, nbytes in parts)
    wanted = torch.full((total,), -1, dtype=torch.int32)
    for leaf, strip in strips:
        at = torch.arange(strip.row_bytes) + leaf.info.offset
        wanted[strip.target : strip.target + strip.row_bytes] = at
    pages, rest = pages_of(strips, itemsize=1)
    found = torch.full((total,), -1, dtype=torch.int32)
    for run in pages.runs:
        assert run.nbytes >= SHORTEST
        assert run.offset % PAGE == run.nbytes % PAGE == (run.target + pages.phase) % PAGE == 0
        assert bool((found[run.target : run.target + run.nbytes] == -1).all())
        found[run.target : run.target + run.nbytes] = torch.arange(run.nbytes) + run.offset
    for leaf, strip in rest:
        assert bool((found[strip.target : strip.target + strip.row_bytes] == -1).all())
        at = torch.arange(strip.row_bytes) + leaf.info.offset + strip.source
        found[strip.target : strip.target + strip.row_bytes] = at
    assert torch.equal(found, wanted)


def test_the_places_in_a_page_that_serve_most_bytes_are_chosen() -> None:
    size = 4 * SHORTEST
    strips = pieces([(8, size), (PAGE + 16, 2 * size), (PAGE - 16, size)])
    pages, rest = pages_of(strips, itemsize=8)
    assert pages.phase == 24
    assert {strip.target for _, strip in rest} >= {0}
    assert pages.nbytes > 2 * size - 2 * PAGE
    assert pages_of(strips, itemsize=16)[0].phase == 0  # 24 is no place for 16-byte elements


def test_short_runs_and_rows_are_read() -> None:
    strips = pieces([(0, SHORTEST - 1)])
    assert pages_of(strips, 1) == ((0, ()), strips)
    leaf, strip = pieces([(0, 4 * SHORTEST)])[0]
    rows = [(leaf, strip._replace(row_bytes=SHORTEST, rows=2, source_stride=2 * SHORTEST))]
    assert pages_of(rows, 1) == ((0, ()), rows)


def test_the_work_is_in_proportion_to_the_number_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    strips = pieces([(PAGE, SHORTEST)] * 4000)  # experts: each part of a parameter is a run
    made = []

    class Counted(page_runs.PageRun):
        def __getattribute__(self, name: str) -> Any:
            made.append(name)
            return super().__getattribute__(name)

    monkeypatch.setattr(page_runs, "PageRun", Counted)
    pages, rest = pages_of(strips, 1)
    assert (len(pages.runs), rest) == (4000, [])
    assert len(made) < 4000 * 20


# -- loads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_fused_parameter_is_pages_of_its_parts(tmp_path: Path, shards: int, tp: int) -> None:
    folder = write(tmp_path, shards)
    for rank in range(tp):
        ours, owned = load(folder, tp, rank), load(folder, tp, rank, alias="never")
        assert same(ours, owned)
        assert counted(ours)
        assert ours.report.bytes_read == ours.plan.bytes_needed
        layer = ours.model.model.layers[0]
        fused = {layer.self_attn.qkv_proj.weight, layer.mlp.gate_up_proj.weight}
        begins = {each.data_ptr() % PAGE for each in fused}
        assert begins != {owned.model.model.layers[0].mlp.gate_up_proj.weight.data_ptr() % PAGE}
    dense = sum(
        p.nbytes
        for name, p in ours.model.named_parameters()
        if "qkv" not in name and "gate_up" not in name and not (tp > 1 and ".o_" in name)
        and not (tp > 1 and "down" in name)
    )  # fmt: skip
    mapped = ours.report.aliased_bytes - dense
    # With three files every fused parameter's parts come from several, which lie differently.
    assert mapped > (0.8 if shards == 1 else 0.3) * FUSED / tp
    assert ours.report.parameter_bytes - ours.report.aliased_bytes >= 0


def test_a_model_that_is_changed_leaves_its_files(llama: Path) -> None:
    path = llama / "model-00001-of-00001.safetensors"
    before = path.read_bytes()
    result = load(llama)
    for param in result.model.parameters():
        param.data.fill_(1)
    assert path.read_bytes() == before
    held = mappings_of(path)
    assert held > LAYERS
    del result, param
    gc.collect()
    assert mappings_of(path) == 0


def test_what_the_system_does_not_map_is_read_and_said(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(into: torch.Tensor, number: int, offset: int) -> int:
        asked.append(offset)
        return errno.ENOMEM if len(asked) % 2 else put_pages(into, number, offset)

    monkeypatch.setattr(mmap_reader, "put_pages", refuse)
    ours = load(llama)
    assert len(asked) > 2
    assert same(ours, load(llama, alias="never"))
    assert counted(ours)
    told = [warning for warning in ours.report.warnings if "should be mapped" in str(warning)]
    assert len(told) == 1
    assert "Cannot allocate memory" in str(told[0])


def test_a_load_makes_so_many_mappings_and_no_more(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(llama).report.aliased_bytes
    monkeypatch.setattr(page_runs, "MOST_RUNS", 5)
    seen = []

    def count(into: torch.Tensor, number: int, offset: int) -> int:
        seen.append(offset)
        return put_pages(into, number, offset)

    monkeypatch.setattr(mmap_reader, "put_pages", count)
    ours = load(llama)
    assert 1 <= len(seen) <= 5
    assert ours.report.aliased_bytes < whole
    assert counted(ours)
    assert same(ours, load(llama, alias="never"))


def test_models_that_live_together_share_a_process_s_mappings(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = runs_held()
    first = load(llama)
    each = runs_held() - before
    assert each >= 2 * LAYERS
    monkeypatch.setattr(page_runs, "MOST_OF_PROCESS", runs_held() + 2)
    second = load(llama)
    assert before + each < runs_held() <= before + each + 2
    assert second.report.aliased_bytes < first.report.aliased_bytes
    assert counted(second)
    assert same(first, second)
    del first, second
    gc.collect()
    assert runs_held() == before


@pytest.mark.parametrize("strategy", [None, "lazy", "prefetch"])
@pytest.mark.parametrize("verify", ["off", "digest"])
def test_strategies_and_digests_go_through_pages_too(
    llama: Path, strategy: str | None, verify: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path))
    options: dict[str, Any] = {"safetensors_load_strategy": strategy, "verify": verify}
    ours = load(llama, **options)
    assert ours.report.aliased_bytes > 0.9 * ours.report.parameter_bytes
    assert counted(ours)
    assert same(ours, load(llama, alias="never"))


def test_a_wrong_byte_in_a_mapped_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    folder = write(tmp_path)
    load(folder, verify="digest")  # records
    path = folder / "model-00001-of-00001.safetensors"
    was = path.stat()
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    with path.open("r+b") as file:
        file.seek(header + (path.stat().st_size - header) // 2)
        file.write(b"\xff\x00\xff\x00")
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))  # the record counts for it
    with pytest.raises(IntegrityError) as caught:
        load(folder, verify="digest")
    assert caught.value.file == path.name


def test_a_file_that_was_cut_is_found_before_its_pages_are(tmp_path: Path) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(bytes(4 * PAGE))
    file = LocalFile("bytes", str(path))
    reader = MmapReader(LoadConfig())
    reader.view(file, 0, 0)
    with path.open("r+b") as opened:
        opened.truncate(2 * PAGE)
    with pytest.raises(TruncatedError):
        reader.overlay(file, PAGE, reserve(2 * PAGE, 0))
    reader.close()


def test_runs_that_are_short_are_not_worth_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_runs, "SHORTEST", 1 << 30)
    ours = load(llama)
    assert ours.report.parameter_bytes - ours.report.aliased_bytes >= LAYERS * 1024 * 512 * 4
