"""A fault in one file of weights, from any format: an error that names file, tensor and offset."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from contract.formats import FORMATS, MatrixFormat
from helpers.digests import corrupt
from helpers.format_models import load
from loadkit import tables
from loadkit.errors import LoadkitError, TruncatedError
from loadkit.readers.base import Extent, Reader
from loadkit.testing.watching import left_behind

# Three of five kinds of GGUF numbers go the same ways as the other two.
FORMS = [form for form in FORMATS if form.name not in ("gguf F16", "gguf F32", "gguf Q8_0")]
each_format = pytest.mark.parametrize("form", FORMS, ids=repr)
Damaged = Callable[..., tuple[Path, Path, dict[str, Any]]]

# An archive of torch.save says what it holds at its end: what is left of a cut one has no names.
NAMELESS = {"pt"}
# Libraries that read by themselves, in ways that nothing in this process can get in between of.
OWN_ENGINE = {"fastsafetensors", "runai_streamer", "instanttensor"}


@pytest.fixture
def copied(in_format: Callable[[MatrixFormat], Path], tmp_path: Path) -> Damaged:
    """A copy of the model in a format, its largest file of weights, and options of its loads."""

    def copy(form: MatrixFormat) -> tuple[Path, Path, dict[str, Any]]:
        folder = Path(shutil.copytree(in_format(form), tmp_path / "model"))
        if isinstance(form.source(folder), str):
            pytest.skip(f"{form.name} has its files from a server: a cut one is fetched again")
        options: dict[str, Any] = {"use_tqdm_on_load": False}
        place = folder
        if form.load_format == "npcache":  # what is read is its cache
            place = tmp_path / "np-cache"
            options["cache_dir"] = str(place)
            load(form, folder, **options)
        files = [path for path in place.rglob("*") if path.is_file() and path.suffix != ".json"]
        return folder, max(files, key=lambda path: path.stat().st_size), options

    return copy


def failed(form: MatrixFormat, folder: Path, file: Path, **options: Any) -> LoadkitError:
    """What a load of it raises; nothing stays open, and nothing goes on running."""
    with left_behind(file.parent) as left, pytest.raises(LoadkitError) as caught:
        load(form, folder, **options)
    assert (left.files, left.threads) == ([], [])
    error = caught.value
    told = (error.file, error.tensor, error.offset, error.hint)
    assert error.file == file.name, told
    assert error.offset is not None and 0 <= error.offset <= file.stat().st_size, told
    assert error.hint, told
    assert file.name in str(error), told
    return error


@each_format
def test_a_file_that_was_cut(form: MatrixFormat, copied: Damaged) -> None:
    folder, file, options = copied(form)
    os.truncate(file, file.stat().st_size * 2 // 3)
    error = failed(form, folder, file, **options)
    assert (error.tensor is None) == (form.load_format in NAMELESS)


@each_format
def test_a_file_that_is_cut_while_it_is_read(
    form: MatrixFormat, copied: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file, options = copied(form)
    options["alias"] = "never"
    name = load(form, folder, **options).report.reader
    cls: Any = tables.readers.lookup(name)
    honest = cls.read

    def cutting(self: Reader, extents: Sequence[Extent], landed: Any = None) -> int:
        os.truncate(file, min(file.stat().st_size, size // 2))
        return int(honest(self, extents, landed))

    size = file.stat().st_size
    monkeypatch.setattr(cls, "read", cutting)
    error = failed(form, folder, file, **options)
    assert isinstance(error, TruncatedError) and error.tensor
    assert error.offset == size // 2


@each_format
def test_a_disk_that_fails(
    form: MatrixFormat, copied: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form.load_format in OWN_ENGINE:
        pytest.skip(f"{form.load_format} reads by itself")
    folder, file, options = copied(form)
    options |= {"alias": "never", "reader": "pread"}
    half = file.stat().st_size // 2
    honest = os.preadv

    def failing(number: int, buffers: Any, offset: int, *rest: Any) -> int:
        into = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
        if Path(into).name == file.name and offset + sum(map(len, buffers)) > half:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return honest(number, buffers, offset, *rest)

    monkeypatch.setattr(os, "preadv", failing)
    error = failed(form, folder, file, **options)
    assert (error.code, error.errno) == ("E_IO", errno.EIO)  # type: ignore[attr-defined]
    assert error.tensor


@each_format
def test_a_bit_that_turned(form: MatrixFormat, copied: Damaged) -> None:
    folder, file, options = copied(form)
    if form.digest:
        options["verify"] = "digest"
    load(form, folder, **options)  # a record of it, where nothing else says what it should be
    corrupt(file, file.stat().st_size * 2 // 3)
    error = failed(form, folder, file, **options)
    assert error.code in ("E_DIGEST", "E_HASH", "E_CRC")
    assert error.tensor
