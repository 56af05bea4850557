"""InstantTensor: its calls, and what the reader makes of the tensors it gives.

Without CUDA the reader works on tensors of a stand-in, whose call has the installed library's
signature: it reads the file by safetensors, and gives views that it overwrites, as the real one.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors import safe_open as plain_open

import loadkit
from helpers.checkpoints import write_llama
from helpers.fake_device import FakeDevice, pretend
from helpers.sharded import QUIET, same_state
from loadkit.availability import NEEDS_CUDA, NEEDS_EXTRA, READY
from loadkit.config import LoadConfig
from loadkit.errors import ChangedError, OptionError, ReadError, UsageError
from loadkit.readers.base import Extent, Place
from loadkit.sources.local_file import LocalFile
from loadkit.testing import contract_config, contract_weights, write_checkpoint
from loadkit.testing.checkpoint import known_here
from loadkit_instanttensor import availability, stream
from loadkit_instanttensor.options import BACKENDS
from loadkit_instanttensor.reader import InstantTensorReader

NAME = "instanttensor"


def installed() -> ast.Module:
    """The library's own source: importing it may fail without CUDA."""
    spec = find_spec(NAME)
    if spec is None or spec.origin is None:
        pytest.skip("instanttensor is not installed")
    return ast.parse(Path(spec.origin).with_name("_impl.py").read_text())


def signature() -> inspect.Signature:
    """Of ``safe_open``, from the installed library."""
    for node in ast.walk(installed()):
        if isinstance(node, ast.ClassDef) and node.name == "safe_open":
            made = next(
                f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"
            )
            names, options = made.args.args, made.args.kwonlyargs
            kinds = inspect.Parameter
            spare = len(names) - len(made.args.defaults)
            return inspect.Signature(
                [
                    kinds(
                        one.arg, kinds.POSITIONAL_OR_KEYWORD,
                        default=kinds.empty if at < spare else None,
                    )
                    for at, one in enumerate(names)
                ]
                + [kinds(one.arg, kinds.KEYWORD_ONLY, default=None) for one in options]
            )  # fmt: skip
    raise AssertionError("instanttensor has no safe_open")


class StandIn:
    """Stands for the module ``instanttensor``, on the CPU."""

    class Backend:
        def __class_getitem__(cls, name: str) -> str:
            return f"Backend.{name}"

    class BackendPolicy(Backend):
        pass

    def __init__(self) -> None:
        self.opened: list[dict[str, Any]] = []
        self.open_now = 0
        self.most = 10**9  # tensors that it gives of a file before it fails

    def safe_open(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature().bind(None, *args, **kwargs).arguments)
        self.opened.append(given)
        return _Opened(self, given)


class _Opened:
    def __init__(self, library: StandIn, given: dict[str, Any]) -> None:
        self.library, self.given = library, given

    def __enter__(self) -> Self:
        self.library.open_now += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.library.open_now -= 1

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        given = self.given
        assert given["copy"] is False and given["tensor_name_match_mode"] == "exact"
        (path,) = given["filename"]
        with plain_open(path, framework="pt") as file:
            names = [n for n in file.offset_keys() if n in given["tensor_filter"]]
            for number, name in enumerate(names):
                if number == self.library.most:
                    raise RuntimeError("I/O error")
                tensor = file.get_tensor(name).clone()
                yield name, tensor
                tensor.zero_()  # a view of a buffer that is used again


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setattr(stream, "require_cuda", lambda: None)
    monkeypatch.setattr(stream, "library", lambda *_, **__: made)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: torch.Stream(device="cpu"))
    return made


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    write_checkpoint(tmp_path, contract_weights())
    opened = LocalFile("model.safetensors", str(tmp_path / "model.safetensors"))
    yield opened
    opened.close()


def starts(file: LocalFile) -> dict[str, tuple[int, int]]:
    """First byte and size of every tensor."""
    from loadkit.safetensors_format import read_header

    return {info.name: (info.offset, info.nbytes) for info in read_header(file).tensors}


def part(
    file: LocalFile, name: str, at: int, row_bytes: int, rows: int = 1, stride: int = 0
) -> Extent:
    start, _ = starts(file)[name]
    dest = torch.zeros(rows * row_bytes, dtype=torch.uint8)
    return Extent(file, start + at, row_bytes, rows, stride or row_bytes, dest, row_bytes, name)


def place(one: Extent) -> Place:
    return Place(one.file, one.offset, one.row_bytes, one.rows, one.file_stride, one.tensor)


def right(one: Extent) -> bool:
    data = Path(str(one.file.path)).read_bytes()
    rows = [data[one.offset + n * one.file_stride :][: one.row_bytes] for n in range(one.rows)]
    return bytes(one.dest.numpy()) == b"".join(rows)


# -- the library -----------------------------------------------------------------------------------


def test_the_call_is_that_of_the_installed_library(library: StandIn, file: LocalFile) -> None:
    options = {"buffer_size": 1 << 30, "chunk_size": 1 << 20, "io_depth": 4, "backend": "URING"}
    made = InstantTensorReader(LoadConfig(reader=NAME, reader_options=options))
    made.read([part(file, "model.norm.weight", 0, 64)])
    (given,) = library.opened  # bound to the real signature
    assert given["tensor_filter"] == ["model.norm.weight"] and given["framework"] == "pt"
    assert given["buffer_size"] == 1 << 30 and given["backend"] == "Backend.URING"
    assert library.open_now == 0
    made.close()


def test_its_names_of_backends_are_ours() -> None:
    found: set[str] = set()
    for node in installed().body:
        if isinstance(node, ast.ClassDef) and node.name in ("Backend", "BackendPolicy"):
            found |= {t.id for one in node.body if isinstance(one, ast.Assign)
                      for t in one.targets if isinstance(t, ast.Name)}  # fmt: skip
    assert found == set(BACKENDS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_without_cuda_the_error_is_typed_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path)
    monkeypatch.setattr(stream, "library", lambda *_, **__: pytest.fail("it was imported"))
    for given in ({"load_format": NAME}, {"reader": NAME}):
        with pytest.raises(UsageError, match="needs CUDA") as caught:
            loadkit.plan(tmp_path, load_config=LoadConfig(**given))
        assert "safetensors" in str(caught.value.hint)


def test_availability_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadkit.availability.has_cuda", lambda: False)
    assert availability.state() == (NEEDS_CUDA if find_spec(NAME) else NEEDS_EXTRA)
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: "0.2.2")
    monkeypatch.setattr("loadkit.availability.has_cuda", lambda: True)
    assert availability.state() == READY
    monkeypatch.setattr("loadkit.availability.installed_version", lambda _: None)
    assert availability.state() == NEEDS_EXTRA


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"backends": "AIO"}, "did you mean 'backend'"),
        ({"backend": "URINGS"}, "did you mean 'URING'"),
        ({"io_depth": 0}, "out of range"),
    ],
)
def test_CFG_06_keys_are_checked(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    write_llama(tmp_path)
    given = LoadConfig(load_format=NAME, model_loader_extra_config=extra)
    with pytest.raises(OptionError, match=message):
        loadkit.plan(tmp_path, load_config=given)


# -- the reader ------------------------------------------------------------------------------------


def test_parts_of_tensors_land_and_tensors_count_whole(library: StandIn, file: LocalFile) -> None:
    made = InstantTensorReader(LoadConfig(reader=NAME))
    tall, flat = "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.down_proj.weight"
    wanted = [
        part(file, tall, 512, 100),
        part(file, tall, 2048, 64, 30, 512),
        part(file, flat, 0, 9),
    ]
    wanted.sort(key=lambda one: one.offset)
    foretold = made.survey([place(one) for one in wanted])
    told: list[int] = []
    assert made.read(wanted, told.append) == foretold.nbytes == sum(told)
    assert foretold == (starts(file)[tall][1] + starts(file)[flat][1], 1)
    assert all(map(right, wanted))
    made.close()


def test_a_tensor_that_several_reads_want_is_brought_once(
    library: StandIn, file: LocalFile
) -> None:
    made = InstantTensorReader(LoadConfig(reader=NAME))
    order = sorted(starts(file), key=lambda name: starts(file)[name][0])
    first, second = order[:2]
    reads = [
        [part(file, first, 0, 100)],
        [part(file, first, 100, 100), part(file, second, 0, 4)],
        [part(file, second, 4, 4)],
        [part(file, first, 0, 8)],
    ]
    foretold = [made.survey([place(one) for one in wanted]).nbytes for wanted in reads]
    assert [made.read(wanted) for wanted in reads] == foretold
    assert all(right(one) for wanted in reads for one in wanted)
    sizes = starts(file)[first][1], starts(file)[second][1]
    assert foretold == [sizes[0], sizes[1], 0, sizes[0]]
    made.close()


def test_what_the_library_cannot_read_names_file_tensor_and_offset(
    library: StandIn, file: LocalFile
) -> None:
    made = InstantTensorReader(LoadConfig(reader=NAME))
    order = sorted(starts(file), key=lambda name: starts(file)[name][0])
    library.most = 1
    with pytest.raises(ReadError, match="InstantTensor says: I/O error") as caught:
        made.read([part(file, name, 0, 4) for name in order[:3]])
    error = caught.value
    assert (error.file, error.tensor) == ("model.safetensors", order[1])
    assert error.offset == starts(file)[order[1]][0] and "pread" in str(error.hint)
    assert library.open_now == 0
    made.close()


def test_a_file_that_was_cut_is_told_as_changed(library: StandIn, file: LocalFile) -> None:
    made = InstantTensorReader(LoadConfig(reader=NAME))
    wanted = [part(file, "model.norm.weight", 0, 4)]
    made.survey([place(wanted[0])])
    library.most = 0
    with Path(str(file.path)).open("r+b") as other:
        other.truncate(file.size - 1)
    with pytest.raises(ChangedError):
        made.read(wanted)
    made.close()


def test_files_that_are_no_safetensors_are_refused(library: StandIn, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(bytes(100))
    other = LocalFile("x.gguf", str(tmp_path / "x.gguf"))
    made = InstantTensorReader(LoadConfig(reader=NAME))
    with pytest.raises(ReadError, match="reads no others"):
        made.survey([Place(other, 0, 8, 1, 8, "t")])
    made.close()
    other.close()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_models_parameters_come_through_it_each_tensor_once(
    on_device: bool, library: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = contract_weights()
    write_checkpoint(tmp_path, weights, contract_config(weights))
    options: dict[str, Any] = {"load_format": NAME, "use_tqdm_on_load": False}
    with known_here():
        plain = loadkit.load_model(tmp_path, load_config=QUIET)
        if on_device:  # fills end inside of tensors
            layer = pretend(monkeypatch, FakeDevice())
            options |= {"staging_slots": 4, "staging_slot_bytes": 64 << 10}
        found = loadkit.load(tmp_path, load_config=LoadConfig(**options))
    report = found.report
    assert report.reader == NAME
    assert report.bytes_read == found.plan.bytes_to_read == report.bytes_needed
    same_state(found.model, plain)
    if on_device:
        assert layer.count["host"] == 0  # no pinned memory: slots are the device's own
        asked = [name for given in library.opened for name in given["tensor_filter"]]
        assert len(asked) == len(set(asked)) == len(weights)


# -- with an accelerator ---------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_model_lands_on_a_device(tmp_path: Path) -> None:
    pytest.importorskip(NAME)
    write_llama(tmp_path)
    plain = loadkit.load_model(tmp_path, load_config=QUIET, device="cuda:0")
    given = LoadConfig(load_format=NAME, use_tqdm_on_load=False)
    found = loadkit.load(tmp_path, load_config=given, device="cuda:0")
    assert found.report.bytes_read == found.plan.bytes_to_read
    same_state(found.model.cpu(), plain.cpu())
