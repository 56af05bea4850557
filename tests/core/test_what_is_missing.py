"""Errors of a folder that lacks a file say what is there in its place, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

import loadkit
from loadkit.config import LoadConfig
from loadkit.errors import ConfigFileError, FormatError
from loadkit.model_config import ModelConfig
from loadkit.sources.local import LocalSource
from loadkit.tokenization.tokenizer_json import from_source


def _source(folder: Path, *names: str) -> LocalSource:
    for name in names:
        (folder / name).write_bytes(b"x")
    return LocalSource(folder, LoadConfig())


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["tekken.json"], "tekken.json"),
        (["tokenizer.model"], "tokenizer.model"),
        (["tokenizer.model.v3"], "tokenizer.model.v3"),
        (["params.json"], None),
        ([], None),
    ],
)
def test_a_tokenizer_of_another_kind_is_named(
    names: list[str], found: str | None, tmp_path: Path
) -> None:
    with _source(tmp_path, *names) as source, pytest.raises(FormatError) as caught:
        from_source(source)
    error = caught.value
    assert error.code == "E_TOKENIZER"
    assert error.detail == {"found": [found] if found else []}
    assert (f"'{found}' is there" in error.message) == bool(found)
    assert "tokenizer.json" in str(error.hint) and "token ids" in str(error.hint)


def test_without_a_config_json_a_hint_says_who_goes_by_what_is_there(tmp_path: Path) -> None:
    with _source(tmp_path, "consolidated.safetensors", "params.json") as source:
        with pytest.raises(ConfigFileError, match=r"has no config\.json") as caught:
            ModelConfig.from_source(source)
        assert "load_format='mistral'" in str(caught.value.hint)
    (tmp_path / "params.json").unlink()
    with _source(tmp_path, "model.safetensors"):
        with pytest.raises(ConfigFileError, match=r"has no config\.json") as caught:
            loadkit.plan(tmp_path, load_format="safetensors")
        assert "beside the weights" in str(caught.value.hint)
