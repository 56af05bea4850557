"""``loadkit generate``: over the real line, in this process and over real ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import loadkit
from helpers.checkpoints import llama_sd, write_cfg, write_llama, write_st
from helpers.cli import Ran
from loadkit import generation
from loadkit.generate import greedy
from loadkit.launch import Patience

Run = Callable[..., Ran]
PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy Llama whose tokenizer has a letter per id."""
    folder = tmp_path_factory.mktemp("generate") / "model"
    write_llama(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    return folder


def _tokenizer() -> dict[str, object]:
    """Characters are tokens: ``a`` is 0, ``b`` is 1; 30 and above steer terminals."""
    letters = [chr(ord("a") + i) for i in range(26)] + list("0123")
    vocab = {text: i for i, text in enumerate([*letters, *map(chr, range(1, 11))])}
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [],
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
        },
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
    }


def expected(model: Path, count: int, prompt: list[int] = PROMPT) -> list[int]:
    """What the model says in Python."""
    return greedy(loadkit.load_model(model), prompt, max_new_tokens=count)


def text_of(ids: list[int]) -> str:
    vocab = _tokenizer()["model"]["vocab"]  # type: ignore[index]
    back = {i: text for text, i in vocab.items()}
    return "".join(back[i] for i in ids)


def test_the_json_object_has_prompt_answer_and_text(run: Run, model: Path) -> None:
    ran = run("generate", model, "--prompt", "bcd", "--max-new-tokens", 8, "--json")
    assert (ran.code, ran.err) == (0, "")
    answer = expected(model, 8)
    assert ran.json() == {
        "schema": "loadkit.generate/1",
        "ok": True,
        "prompt_ids": PROMPT,
        "output_ids": answer,
        "text": text_of(answer),
    }


def test_people_get_the_text_and_nothing_that_steers_a_terminal(run: Run, model: Path) -> None:
    ran = run("generate", model, "--prompt", "bcd", "--max-new-tokens", 12)
    assert (ran.code, ran.err) == (0, "")
    text = text_of(expected(model, 12))
    assert any(not char.isprintable() for char in text)
    shown = (c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)
    assert ran.out == "".join(shown) + "\n"


def test_ids_need_no_tokenizer(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path)
    ran = run("generate", tmp_path, "--prompt-ids", "1, 2,3", "--max-new-tokens", 5, "--json")
    assert ran.code == 0
    assert ran.json()["text"] is None
    assert ran.json()["output_ids"] == expected(tmp_path, 5)
    people = run("generate", tmp_path, "--prompt-ids", "1,2,3", "--max-new-tokens", 5)
    assert people.out == " ".join(map(str, expected(tmp_path, 5))) + "\n"
    assert "tokenizer.json" in people.err


def test_a_text_without_a_tokenizer_names_what_was_looked_for(run: Run, tmp_path: Path) -> None:
    write_llama(tmp_path)
    ran = run("generate", tmp_path, "--prompt", "hello", "--json")
    assert ran.code == 1
    assert ran.json()["error"]["code"] == "E_TOKENIZER"
    assert "tokenizer.json" in ran.err


@pytest.mark.parametrize("where", ["config.json", "generation_config.json"])
def test_it_stops_where_the_checkpoint_says(run: Run, tmp_path: Path, where: str) -> None:
    write_llama(tmp_path)
    whole = expected(tmp_path, 8)
    end = whole[2]
    short = whole[: whole.index(end) + 1]
    values = json.loads((tmp_path / where).read_text()) if where == "config.json" else {}
    (tmp_path / where).write_text(json.dumps({**values, "eos_token_id": [end, 39]}))
    base = ("generate", tmp_path, "--prompt-ids", "1,2,3", "--max-new-tokens", 8, "--json")
    assert run(*base).json()["output_ids"] == short
    assert run(*base, "--ignore-eos").json()["output_ids"] == whole


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt"),
        (["--prompt-ids", "1,x"], "'x'"),
        (["--prompt-ids", ""], "''"),
        (["--prompt-ids", "1", "--chat"], "--chat"),
        (["--prompt-ids", "1,40"], "0..39"),
        (["--prompt", "a", "--rank", "0", "--tp", "2"], "--rank"),
        (["--prompt", ""], "no tokens"),
        (["--prompt", "a", "--chat"], "chat template"),
    ],
    ids=str,
)
def test_UX_what_cannot_be_is_a_usage_error(
    run: Run, model: Path, arguments: list[str], words: str
) -> None:
    ran = run("generate", model, *arguments)
    assert ran.code == 2
    assert words in ran.err


def test_a_chat_is_the_templates_text(run: Run, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    folder = tmp_path / "chat"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    template = "u{% for m in messages %}{{ m.content }}{% endfor %}z"
    (folder / "chat_template.jinja").write_text(template)
    arguments = ("--prompt", "bc", "--chat", "--max-new-tokens", 2, "--json")
    ran = run("generate", folder, *arguments)
    assert ran.code == 0, ran.err
    assert ran.json()["prompt_ids"] == [20, 1, 2, 25]


def test_a_tp_that_does_not_divide_names_the_legal_ones(run: Run, model: Path) -> None:
    ran = run("generate", model, "--prompt", "a", "--tp", 3, "--json")
    assert ran.code == 1
    error = ran.json()["error"]
    assert (error["code"], error["detail"]["legal"]) == ("TP_INDIVISIBLE", [1, 2, 4])


def test_its_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom loadkit.cli import main\n"
        "assert main(['generate', '--help']) == 0\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout


# -- real ranks -----------------------------------------------------------------------------------


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "loadkit.cli", "generate", *map(str, arguments)]


def test_two_ranks_say_the_same_with_every_standard_stream_strange(model: Path) -> None:
    line = command(model, "--prompt", "bcd", "--max-new-tokens", 12, "--tp", 2, "--json")
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *line], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["output_ids"] == expected(model, 12)


def test_a_rank_that_cannot_load_is_named_with_its_problems(tmp_path: Path) -> None:
    write_cfg(tmp_path)
    state = llama_sd()
    del state["model.norm.weight"]
    write_st(tmp_path / "model.safetensors", state)
    line = command(tmp_path, "--prompt-ids", "1", "--tp", 2, "--json")
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["error"]["code"] == "E_PLAN"
    assert [problem["parameter"] for problem in found["problems"]] == ["model.norm.weight"]
    assert "error: E_PLAN: rank " in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def speaking(
    model: Path, *options: object
) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Two ranks that speak without end, and their processes in rank order."""
    line = command(
        model, "--prompt-ids", "1,2,3", "--max-new-tokens", 1_000_000, "--tp", 2, *options
    )
    process = subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.read(1), process.communicate()[1]  # it speaks
        ranks = psutil.Process(process.pid).children()
        yield process, sorted(ranks, key=lambda rank: rank.create_time())
    finally:
        process.kill()
        process.communicate()


def end_of(process: subprocess.Popen[str], ranks: list[psutil.Process]) -> tuple[int, str, float]:
    """Exit code, stderr, and seconds until the command ended; no rank may be left."""
    started = time.monotonic()
    _, err = process.communicate(timeout=60)
    seconds = time.monotonic() - started
    assert len(ranks) == 2
    assert not [rank for rank in ranks if rank.is_running()]
    return process.returncode, err, seconds


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_is_the_one_cause(model: Path, which: int) -> None:
    with speaking(model) as (process, ranks):
        ranks[which].kill()
        code, err, seconds = end_of(process, ranks)
    assert code == 1
    assert f"error: E_RANK: rank {which} of 2: its process was killed by SIGKILL" in err
    assert err.count("error:") == 1
    assert seconds < 10


def test_the_timeout_is_the_ranks_patience(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of that patience: ``test_launch``, and the next test in full."""
    seen: list[Patience] = []

    def continued(*_: object, patience: Patience, **__: object) -> list[int]:
        seen.append(patience)
        return []

    monkeypatch.setattr(generation, "continue_prompt", continued)
    line = ("generate", model, "--prompt-ids", "1", "--tp", 2)
    assert run(*line).code == run(*line, "--timeout", 3).code == 0
    assert seen == [Patience(), replace(Patience(), silence=3, collective=3)]


@pytest.mark.slow
def test_a_stopped_rank_is_given_up_after_the_timeout(model: Path) -> None:
    with speaking(model, "--timeout", 3) as (process, ranks):
        ranks[1].suspend()
        code, err, seconds = end_of(process, ranks)
    assert code == 1
    assert "E_RANK" in err
    assert "rank 1 of 2" in err
    assert err.count("error:") == 1
    assert seconds < 15


def test_ctrl_c_stops_every_rank(model: Path) -> None:
    with speaking(model) as (process, ranks):
        os.kill(process.pid, signal.SIGINT)
        code, err, seconds = end_of(process, ranks)
    assert code == 130
    assert err == "interrupted\n"
    assert seconds < 2


def test_ranks_do_not_outlive_a_killed_parent(model: Path) -> None:
    with speaking(model) as (process, ranks):
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
