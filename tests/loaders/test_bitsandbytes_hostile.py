"""F32: what a checkpoint says of its quantised tensors cannot be: E_QUANT, naming the tensor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("bitsandbytes")

import loadkit
from helpers.bitsandbytes_files import pack, pack_eight, write_quantised
from loadkit.config import LoadConfig
from loadkit.errors import FormatError

QUIET = LoadConfig(use_tqdm_on_load=False)
BASE = "model.layers.1.self_attn.o_proj.weight"
STATE = f"{BASE}.quant_state.bitsandbytes__nf4"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("honest")
    write_quantised(folder, partial(pack, compress_statistics=True))
    return folder


@pytest.fixture(scope="module")
def honest_eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    write_quantised(folder, pack_eight)
    return folder


def refused(source: Path, folder: Path, change: Callable[[Tensors], object]) -> FormatError:
    """The error of a checkpoint after a change; it comes at once, and names the file."""
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    started = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        loadkit.load(folder, load_config=QUIET)
    assert time.perf_counter() - started < 2
    error = caught.value
    assert error.code == "E_QUANT" and error.file == "model.safetensors"
    assert error.offset is not None and error.tensor in str(error) and error.hint
    return error


def text(tensors: Tensors, data: bytes) -> None:
    tensors[STATE] = torch.tensor(list(data), dtype=torch.uint8)


def said(**changes: Any) -> Callable[[Tensors], None]:
    """A change of the JSON; a value of None takes the key out."""

    def change(tensors: Tensors) -> None:
        values = {**json.loads(bytes(tensors[STATE].tolist())), **changes}
        values = {key: value for key, value in values.items() if value is not None}
        text(tensors, json.dumps(values).encode())

    return change


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        pytest.param(b"", "no JSON", id="empty"),
        pytest.param(b"{", "no JSON", id="cut"),
        pytest.param(b"[1]", "no object", id="list"),
        pytest.param(b"\xff\xfe{}", "no JSON", id="bytes"),
        pytest.param(b'{"a":' * 5000, "no JSON", id="deep"),
        pytest.param(b'{"quant_type":"nf4","quant_type":"nf4"}', "no JSON", id="twice"),
        pytest.param(b"{}", "lacks blocksize, dtype, quant_type, shape", id="nothing"),
        pytest.param(b'{"shape": [' + b"9" * 5000 + b"]}", "no JSON", id="digits"),
    ],
)
def test_F32_a_state_that_is_malformed(
    data: bytes, problem: str, honest: Path, tmp_path: Path
) -> None:
    error = refused(honest, tmp_path, lambda tensors: text(tensors, data))
    assert error.tensor == STATE and problem in str(error)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        pytest.param({"blocksize": 0}, "blocksize is '0'", id="blocksize-0"),
        pytest.param({"blocksize": -64}, "blocksize is '-64'", id="blocksize-negative"),
        pytest.param({"blocksize": 63}, "blocksize is '63'", id="blocksize-63"),
        pytest.param({"blocksize": True}, "blocksize", id="blocksize-bool"),
        pytest.param({"blocksize": [64]}, "blocksize", id="blocksize-list"),
        pytest.param({"blocksize": 1 << 70}, "blocksize", id="blocksize-huge"),
        pytest.param({"quant_type": "fp4"}, "its name says 'nf4'", id="type-lies"),
        pytest.param({"quant_type": "int4"}, "known are nf4 and fp4", id="type-unknown"),
        pytest.param({"dtype": "float8"}, "dtype is 'float8'", id="dtype"),
        pytest.param({"dtype": 3}, "dtype", id="dtype-number"),
        pytest.param({"shape": [256]}, "no", id="shape-1d"),
        pytest.param({"shape": [0, 256]}, "shape", id="shape-0"),
        pytest.param({"shape": [-1, -65536]}, "shape", id="shape-negative"),
        pytest.param({"shape": [256, 1 << 62]}, "shape", id="shape-huge"),
        pytest.param({"shape": "256x256"}, "shape", id="shape-text"),
        pytest.param({"nested_blocksize": 0}, "nested_blocksize", id="nested-0"),
        pytest.param({"nested_offset": "1"}, "nested_offset", id="offset-text"),
        pytest.param({"nested_offset": None}, "lacks nested_offset", id="offset-gone"),
        pytest.param({"nested_dtype": "float16"}, "nested_dtype", id="nested-dtype"),
        pytest.param({"run": "me"}, "unknown 'run'", id="unknown"),
    ],
)
def test_F32_a_state_with_values_that_cannot_be(
    change: dict[str, Any], problem: str, honest: Path, tmp_path: Path
) -> None:
    error = refused(honest, tmp_path, said(**change))
    assert error.tensor == STATE and problem in str(error)


def test_F32_a_state_that_lies_about_the_shape(honest: Path, tmp_path: Path) -> None:
    error = refused(honest, tmp_path, said(shape=[512, 256]))
    assert error.tensor == BASE and "[512, 256] in 4 bits, which is 65536 bytes" in str(error)
    error = refused(honest, tmp_path, said(blocksize=128))  # twice as many scales as blocks
    assert error.tensor == f"{BASE}.absmax" and "makes 512" in str(error)


@pytest.mark.parametrize("role", ["absmax", "quant_map", "nested_absmax", "nested_quant_map"])
def test_F32_a_part_is_missing_or_of_another_size(role: str, honest: Path, tmp_path: Path) -> None:
    name = f"{BASE}.{role}"
    error = refused(honest, tmp_path / "gone", lambda t: t.pop(name))
    assert error.tensor == BASE and f"{role} (" in str(error)

    def short(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:-1].clone()

    def other(tensors: Tensors) -> None:
        tensors[name] = tensors[name].to(torch.int32)

    for at, change in enumerate((short, other)):
        error = refused(honest, tmp_path / str(at), change)
        assert error.tensor == name


def test_F32_nested_parts_and_the_states_words_on_nesting_go_together(
    honest: Path, tmp_path: Path
) -> None:
    plain = said(nested_blocksize=None, nested_dtype=None, nested_offset=None)
    error = refused(honest, tmp_path, plain)
    assert error.tensor == f"{BASE}.absmax" and "float32" in str(error)


def test_F32_a_code_with_what_is_no_number(honest: Path, tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[f"{BASE}.quant_map"][3] = float("nan")

    assert refused(honest, tmp_path, spoil).tensor == f"{BASE}.quant_map"


def test_F32_parts_without_a_state_and_a_state_without_a_weight(
    honest: Path, tmp_path: Path
) -> None:
    error = refused(honest, tmp_path / "a", lambda tensors: tensors.pop(STATE))
    assert error.tensor in {BASE, *(f"{BASE}.{r}" for r in ("absmax", "quant_map"))} or (
        error.tensor is not None and error.tensor.startswith(BASE)
    )
    assert "quant_state" in str(error) and "missing" in str(error)
    error = refused(honest, tmp_path / "b", lambda tensors: tensors.pop(BASE))
    assert error.tensor == STATE and "not there" in str(error)

    def twice(tensors: Tensors) -> None:
        tensors[STATE.replace("nf4", "fp4")] = tensors[STATE].clone()

    assert "fp4" in str(refused(honest, tmp_path / "c", twice))


def test_F32_int8_scales_and_formats(honest_eight: Path, tmp_path: Path) -> None:
    scales = BASE.replace("weight", "SCB")
    error = refused(honest_eight, tmp_path / "a", lambda t: t.pop(scales))
    assert error.tensor == BASE and "scales" in str(error)

    def short(tensors: Tensors) -> None:
        tensors[scales] = tensors[scales][:-1].clone()

    assert refused(honest_eight, tmp_path / "b", short).tensor == scales

    def tiled(tensors: Tensors) -> None:
        tensors[f"{BASE}_format"] = torch.tensor(2, dtype=torch.uint8)

    error = refused(honest_eight, tmp_path / "c", tiled)
    assert error.tensor == f"{BASE}_format" and "it is 2" in str(error)
    error = refused(honest_eight, tmp_path / "d", lambda t: t.pop(BASE))
    assert error.tensor == scales
    no_format = load_file(honest_eight / "model.safetensors")
    for name in [n for n in no_format if n.endswith("weight_format")]:
        del no_format[name]  # as older versions save it
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_bytes((honest_eight / "config.json").read_bytes())
    save_file(no_format, folder / "model.safetensors")
    assert loadkit.plan(folder, load_config=QUIET).ok


def test_names_are_not_printed_raw(honest: Path, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        tensors["a\u202eb\u0085.weight.quant_state.bitsandbytes__nf4"] = tensors[STATE].clone()

    error = refused_with_any_name(honest, tmp_path, rename)
    assert "\u202e" not in str(error) and "\u0085" not in str(error)


def refused_with_any_name(
    source: Path, folder: Path, change: Callable[[Tensors], None]
) -> FormatError:
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FormatError) as caught:
        loadkit.load(folder, load_config=QUIET)
    assert caught.value.code in ("E_QUANT", "E_NAME")
    return caught.value
