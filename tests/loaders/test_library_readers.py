"""Readers whose bytes a library moves: runai and fastsafetensors, by any loader of local files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import loadkit
from helpers.extents import check, content, extent, held, surveyed
from loadkit import tables
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import (
    ChangedError,
    IntegrityError,
    NotInstalledError,
    OptionError,
    ReadError,
    TruncatedError,
)
from loadkit.readers import library, ranges
from loadkit.readers.base import Extent, Reader
from loadkit.sources.local_file import LocalFile
from loadkit.testing import contract_config, contract_weights, write_checkpoint
from loadkit.testing.checkpoint import known_here

SIZE = 2 << 20
READERS = ["runai", "fastsafetensors"]
LIBRARIES = {"runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
FORMATS = {"runai": "runai_streamer", "fastsafetensors": "fastsafetensors"}


@pytest.fixture(params=READERS)
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(LIBRARIES[request.param])
    return str(request.param)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bytes") / "data.bin"
    made.write_bytes(content(SIZE))
    return made


@pytest.fixture
def file(path: Path) -> Iterator[LocalFile]:
    opened = LocalFile(path.name, str(path))
    yield opened
    opened.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    weights = contract_weights()
    with known_here():
        yield write_checkpoint(tmp_path / "checkpoint", weights, contract_config(weights))


def make(name: str, **options: Any) -> Reader:
    cls: Any = tables.readers.lookup(name)
    reader: Reader = cls(LoadConfig(**{"reader": name, "num_threads": 2, **options}))
    return reader


def config(**options: Any) -> LoadConfig:
    return LoadConfig(use_tqdm_on_load=False, **options)


def native_threads() -> int:
    """Threads of this process that Python does not know."""
    return len(list(Path("/proc/self/task").iterdir())) - threading.active_count()


def settled(before: int) -> int:
    """How many more there are than before, once those on their way out are gone."""
    until = time.monotonic() + 5
    while native_threads() > before and time.monotonic() < until:
        time.sleep(0.02)
    return native_threads() - before


# -- bytes ---------------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """offset, row_bytes, rows, file_stride, dest_stride of an extent inside SIZE bytes."""
    row_bytes = draw(st.sampled_from([0, 1, 7, 300, 4096, 30_000, ranges.SHORT_ROW, 40_001]))
    gap = draw(st.sampled_from([-1, 0, 1, 500, ranges.GAP, ranges.GAP + 1]))
    stride = max(0, row_bytes + gap)
    rows = draw(st.integers(0, max(1, min(90, (SIZE - row_bytes) // max(1, stride)))))
    offset = draw(st.integers(0, max(0, SIZE - (max(0, rows - 1) * stride + row_bytes))))
    return offset, row_bytes, rows, stride, row_bytes + draw(st.sampled_from([0, 5]))


@pytest.mark.parametrize("reader", READERS)
@settings(max_examples=25)
@given(drawn=st.lists(shapes(), max_size=5))
def test_any_extents_give_the_files_bytes_and_the_counts_foretold(
    reader: str, drawn: list[tuple[int, int, int, int, int]], path: Path
) -> None:
    pytest.importorskip(LIBRARIES[reader])
    opened = LocalFile(path.name, str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "PIECE", 25_000)
        patch.setattr(ranges, "RANGES", 7)
        patch.setattr(ranges, "SPAN", 100_000)
        patch.setattr(ranges, "BATCH", 500_000)
        made = make(reader)
        extents = [extent(opened, *shape) for shape in sorted(drawn)]
        foretold = surveyed(made, extents)
        check(made, extents, path.read_bytes())
        cut = [item for batch in ranges.batches(extents, made._memory) for item in batch.ranges]
        assert foretold == (sum(item.nbytes for item in cut), len(cut))
        made.close()
    opened.close()


def test_more_pieces_than_a_submission_takes_are_all_there(file: LocalFile, path: Path) -> None:
    pytest.importorskip(LIBRARIES["runai"])  # it loses some where it is given 60,000 at once
    memory = torch.zeros(30 * 60_000, dtype=torch.uint8)
    reader = make("runai")
    parts = memory.split(30)
    reader.read([Extent(file, 32 * n, 30, 1, 30, part, 30, "t") for n, part in enumerate(parts)])
    reader.close()
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    assert torch.equal(memory.view(-1, 30), data[: 32 * 60_000].view(-1, 32)[:, :30])


def test_rows_with_small_gaps_are_one_request_and_far_ones_are_exact(
    name: str, file: LocalFile
) -> None:
    reader = make(name)
    assert surveyed(reader, [extent(file, 5, 100, 200, 1000, 100)]) == (199 * 1000 + 100, 1)
    assert surveyed(reader, [extent(file, 5, 100, 20, 100 + ranges.GAP + 1, 100)]) == (2000, 20)
    reader.close()


def test_the_buffer_is_the_only_memory_beside_the_parameters(name: str, file: LocalFile) -> None:
    reader = make(name)
    assert reader.buffer_bytes() == library.BUFFER
    reader.read([extent(file, 0, 100, 50, 300, 100)])
    memory: Any = reader
    assert memory._buffer.numel() == library.BUFFER
    reader.close()
    assert memory._buffer is None


# -- loads ---------------------------------------------------------------------------------------


def test_Q_05_every_rank_has_what_the_default_loader_gives_and_owns_it(
    name: str, folder: Path
) -> None:
    for rank in range(2):
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        found = loadkit.load(
            folder, load_format=FORMATS[name], parallel=parallel, load_config=config()
        )
        plain = loadkit.load(folder, parallel=parallel, load_config=config())
        assert found.report.reader == name and found.report.aliased_bytes == 0
        assert found.report.bytes_read == found.plan.bytes_to_read
        assert found.report.bytes_needed == plain.report.bytes_needed
        expected_ = dict(plain.model.named_parameters())
        assert all(torch.equal(p, expected_.pop(n)) for n, p in found.model.named_parameters())
        assert not expected_


def test_a_named_reader_serves_any_loader_of_local_files(
    name: str, folder: Path, tmp_path: Path
) -> None:
    loadkit.save(loadkit.load_model(folder, load_config=config()), tmp_path / "ranks",
                 save_format="sharded_state")  # fmt: skip
    plain = dict(loadkit.load_model(folder, load_config=config()).named_parameters())
    for source in (folder, tmp_path / "ranks"):
        found = loadkit.load(source, load_config=config(reader=name))
        assert found.report.reader == name
        assert all(torch.equal(p, plain[n]) for n, p in found.model.named_parameters())
    tensors = dict(loadkit.iter_weights(folder, load_config=config(reader=name)))
    assert all(torch.equal(w, tensors[n]) for n, w in contract_weights().items())


def test_auto_never_picks_them(name: str, folder: Path) -> None:
    for options in ({}, {"alias": "never"}, {"num_threads": 3}):
        found = loadkit.plan(folder, load_config=config(**options))
        assert found.load_format == "safetensors" and found.reader not in LIBRARIES


def test_digests_are_verified_and_a_flipped_bit_is_found(name: str, folder: Path) -> None:
    options = {"load_format": FORMATS[name], "verify": "digest", "digest_store": "checkpoint"}
    loadkit.load(folder, load_config=config(**options))
    file = folder / "model.safetensors"
    data, times = bytearray(file.read_bytes()), file.stat()
    data[-5] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(IntegrityError) as caught:
        loadkit.load(folder, load_config=config(**options))
    assert caught.value.file == "model.safetensors" and caught.value.hint


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reader_options": {"concurency": 1}}, "reader_options.*go together"),
        ({"reader": "pread", "reader_options": {"concurrency": 1}}, "'pread' has no option"),
    ],
)
def test_CFG_06_options_of_a_reader_that_is_not_named_are_refused(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        loadkit.plan(folder, load_config=config(**options))


def test_CFG_06_an_unknown_option_of_the_reader_names_the_nearest(name: str, folder: Path) -> None:
    option = next(iter(make(name).options))
    given = config(reader=name, reader_options={option[:-1]: 1})
    with pytest.raises(OptionError, match=f"did you mean '{option}'"):
        loadkit.plan(folder, load_config=given)


def test_another_reader_than_the_formats_is_refused(name: str, folder: Path) -> None:
    with pytest.raises(OptionError, match=f"read by the reader '{name}'"):
        loadkit.plan(folder, load_config=config(load_format=FORMATS[name], reader="pread"))
    loadkit.plan(folder, load_config=config(load_format=FORMATS[name], reader=name))


def test_an_option_in_both_places_has_one_value(name: str, folder: Path) -> None:
    option = next(iter(make(name).options))
    both = {"model_loader_extra_config": {option: 2}, "load_format": FORMATS[name], "reader": name}
    loadkit.plan(folder, load_config=config(**both, reader_options={option: 2}))
    with pytest.raises(OptionError, match="says one thing"):
        loadkit.plan(folder, load_config=config(**both, reader_options={option: 3}))


def test_the_strategies_of_other_readers_are_refused(name: str, folder: Path) -> None:
    for strategy in ("lazy", "eager", "prefetch"):
        given = config(load_format=FORMATS[name], safetensors_load_strategy=strategy)
        with pytest.raises(OptionError, match="safetensors_load_strategy"):
            loadkit.plan(folder, load_config=given)


def test_without_the_library_the_error_has_the_pip_line(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "find_spec", lambda _: None)
    for options in ({"load_format": FORMATS[name]}, {"reader": name}):
        with pytest.raises(NotInstalledError, match=r'pip install "loadkit\['):
            loadkit.plan(folder, load_config=config(**options))


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [*READERS, "pread"])
def test_a_file_that_is_cut_while_it_is_read_is_the_same_error_from_every_reader(
    reader: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: Any = tables.readers.lookup(reader)
    file = folder / "model.safetensors"
    honest = cls.read

    def cutting(self: Reader, extents: Sequence[Extent], landed: Any = None) -> int:
        os.truncate(file, file.stat().st_size // 2)
        return int(honest(self, extents, landed))

    monkeypatch.setattr(cls, "read", cutting)
    before = native_threads()
    with pytest.raises(TruncatedError) as caught:
        loadkit.load(folder, load_config=config(reader=reader, alias="never"))
    error = caught.value
    assert error.file == "model.safetensors" and error.tensor and error.hint
    assert error.offset == file.stat().st_size
    assert error.code == "E_TRUNCATED"
    del caught, error
    assert settled(before) <= 0


def test_a_file_that_is_replaced_is_noticed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls: Any = tables.readers.lookup(name)
    honest = cls.read

    def replacing(self: Reader, extents: Sequence[Extent], landed: Any = None) -> int:
        file = folder / "model.safetensors"
        other = folder / "other"
        other.write_bytes(file.read_bytes())
        other.replace(file)
        return int(honest(self, extents, landed))

    monkeypatch.setattr(cls, "read", replacing)
    with pytest.raises(ChangedError):
        loadkit.load(folder, load_config=config(reader=name))


def _fail(name: str, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library fail at every range after the third."""
    if name == "runai":
        calls = reader._streamer._calls
        answers = calls.runai_response
        seen: list[int] = []

        def answer(handle: Any, timeout: int) -> Any:
            code, *rest = answers(handle, timeout)
            seen.append(code)
            return (code if len(seen) < 4 else 11, *rest)

        monkeypatch.setattr(calls, "runai_response", answer)
        return
    engine = reader._engines.of(torch.device("cpu"))
    waits = engine.wait
    counted: list[bool] = []

    def wait(request: Any) -> bool:
        counted.append(waits(request))
        return counted[-1] and len(counted) < 4

    monkeypatch.setattr(engine, "wait", wait)


def test_what_only_the_library_cannot_read_is_told_as_its_failure(
    name: str, file: LocalFile, path: Path
) -> None:
    before = native_threads()
    reader = make(name)
    with pytest.MonkeyPatch.context() as patch:
        _fail(name, reader, patch)
        wanted = [extent(file, 1000 * n, 900, tensor=f"t{n}") for n in range(50)]
        with pytest.raises(ReadError, match="without an error") as caught:
            reader.read(wanted)
    assert caught.value.file == "data.bin" and str(caught.value.tensor).startswith("t")
    assert caught.value.offset is not None and "pread" in str(caught.value.hint)
    again = [extent(file, 10, 2000)]
    check(reader, again, path.read_bytes())  # it can go on
    reader.close()
    del reader, caught
    assert settled(before) <= 0


def test_an_interrupt_in_the_middle_ends_all_writing(
    name: str, file: LocalFile, path: Path
) -> None:
    before = native_threads()
    reader = make(name)
    wanted = [extent(file, 4000 * n, 3900) for n in range(500)]
    landed: list[int] = []

    def interrupt(nbytes: int) -> None:
        landed.append(nbytes)
        if len(landed) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reader.read(wanted, interrupt)
    assert len(landed) == 3
    seen = [held(one) for one in wanted]
    reader.close()
    del reader
    assert settled(before) <= 0
    assert [held(one) for one in wanted] == seen


def test_a_path_that_the_library_cannot_be_told_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("runai_model_streamer")
    odd = tmp_path / os.fsdecode(b"odd\xff.bin")
    odd.write_bytes(content(5000))
    file = LocalFile("odd.bin", str(odd))
    reader = make("runai")
    with pytest.raises(ReadError, match="no name"):
        reader.read([extent(file, 0, 10)])
    reader.close()
    file.close()
