"""One model through every load format that can hold it, and the table that says what each can.

The small model has SmolLM2's shape (9 heads over 3 kv heads, tied), so that tp 3 is legal; the real
one is SmolLM2 itself where its package can be fetched, else random numbers of its sizes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import loadkit
from contract.formats import FORMATS, MatrixFormat
from contract.formats.table import on_page, table
from helpers.format_models import (
    SMALL,
    SMOLLM2,
    Model,
    check_same,
    load,
    made,
    plain,
    save,
    written,
)
from loadkit import tables
from loadkit.config import LoadConfig
from loadkit.errors import UsageError

PROMPT = [504, 3575, 282, 4649, 314]  # The capital of France is
each_format = pytest.mark.parametrize("form", FORMATS, ids=repr)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return made(tmp_path_factory.mktemp("small"), SMALL)


@pytest.fixture(scope="module")
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Model]:
    """SmolLM2 in bfloat16."""
    folder = tmp_path_factory.mktemp("real")
    try:
        file = request.getfixturevalue("smollm2")
    except pytest.skip.Exception:
        yield made(folder, SMOLLM2)
    else:
        model = loadkit.load_model(
            str(file), dtype="bfloat16", load_config=LoadConfig(use_tqdm_on_load=False)
        )
        loadkit.save(model, folder)
        config = json.loads((folder / "config.json").read_text())
        yield Model(load_file(folder / "model.safetensors"), config, folder)
    shutil.rmtree(folder)


def check_all_ranks(form: MatrixFormat, model: Model, folder: Path, tp: int) -> None:
    if tp not in form.tp_sizes:
        pytest.skip(f"{form.name} is not loaded at tp {tp}")
    for rank in range(tp):
        check_same(form, load(form, folder, tp, rank).model, plain(model, tp, rank))


@each_format
def test_a_small_model_is_the_same_from_every_format(
    form: MatrixFormat, small: Model, tmp_path: Path
) -> None:
    folder = written(form, small, tmp_path / "model")
    for tp in form.tp_sizes:
        check_all_ranks(form, small, folder, tp)


@pytest.mark.slow
@each_format
def test_smollm2_is_the_same_from_every_format_and_speaks_the_same(
    form: MatrixFormat, real: Model, tmp_path: Path
) -> None:
    folder = written(form, real, tmp_path / "model")
    try:
        for tp in form.tp_sizes:
            check_all_ranks(form, real, folder, tp)
        if form.lossless:
            said, expected = (
                loadkit.generate(one, PROMPT, max_new_tokens=8)
                for one in (load(form, folder).model, plain(real))
            )
            assert said == expected
    finally:
        shutil.rmtree(folder)


@each_format
def test_the_table_says_what_a_format_does(
    form: MatrixFormat, small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    folder = written(form, small, tmp_path / "model")
    whole = load(form, folder)
    assert (whole.report.aliased_bytes > 0) == form.zero_copy
    part = load(form, folder, 3, 1)
    exact = {row.exact for row in part.plan.rows if row.parameter is not None} == {"exact"}
    less = part.plan.bytes_to_read < 0.7 * whole.plan.bytes_to_read  # a third, and gaps in rows
    assert (exact and less) == form.tp_slices
    digests = load(form, folder, verify="digest") if form.digest else None
    assert digests is None or digests.report.verified
    loader: Any = tables.loaders.lookup(form.load_format)
    assert loader.__module__.partition(".")[0] == form.distribution.replace("-", "_")
    saved = tmp_path / "saved"
    if form.save:
        save(form, whole.model, saved)
        check_same(form, load(form, saved).model, whole.model, exact=True)
    else:
        with pytest.raises(UsageError, match="can be loaded and not saved"):
            save(form, whole.model, saved)


def test_the_table_of_the_docs_is_that_of_the_code() -> None:
    assert on_page() == table(), "run: python tests/contract/formats/table.py"
