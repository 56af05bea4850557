"""``loadkit convert``, ``diff`` and ``verify``: what they write, and how they end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_llama, write_st
from helpers.cli import Ran
from helpers.saving import read, same
from loadkit.cli.sizes import byte_size

Run = Callable[..., Ran]


@pytest.fixture
def a(tmp_path: Path) -> Path:
    write_llama(tmp_path / "a", layers=1)
    return tmp_path / "a"


def test_convert_tells_what_it_wrote(run: Run, a: Path, tmp_path: Path) -> None:
    ran = run("convert", a, tmp_path / "b", "--max-shard-size", "6kB", "--dtype", "bfloat16")
    assert ran.code == 0, ran.err
    ran.assert_clean()
    for words in ("format   safetensors", "names    model", "tensors  12", "float32 -> bfloat16"):
        assert words in ran.out
    assert len(list((tmp_path / "b").glob("model-*.safetensors"))) == 2


def test_convert_json_is_the_report(run: Run, a: Path, tmp_path: Path) -> None:
    ran = run("convert", a, tmp_path / "b", "--to", "sharded_state", "--tp", 2, "--json")
    assert ran.code == 0, ran.err
    said = ran.json()
    assert (said["schema"], said["ok"]) == ("loadkit.convert/1", True)
    assert said["topology"] == {"tp": 2, "pp": 1, "ep": 1}
    assert said["files"] == [f"model-rank-{rank}-part-0.safetensors" for rank in (0, 1)]
    assert said["bytes_written"] == said["total_size"]
    assert said["path"] == str(tmp_path / "b")


def test_a_second_convert_is_refused_and_overwrite_replaces(
    run: Run, a: Path, tmp_path: Path
) -> None:
    state = read(a)
    assert run("convert", a, tmp_path / "b").code == 0
    ran = run("convert", a, tmp_path / "b", "--json")
    assert ran.code == 2
    assert ran.json()["error"]["code"] == "EXISTS"
    assert "--overwrite" in ran.err
    assert run("convert", a, tmp_path / "b", "--overwrite", "--names", "checkpoint").code == 0
    same(read(tmp_path / "b"), state)


def test_problems_end_convert_with_1_and_nothing_is_written(
    run: Run, a: Path, tmp_path: Path
) -> None:
    state = read(a)
    del state["model.norm.weight"]
    write_st(a / "model.safetensors", state)
    ran = run("convert", a, tmp_path / "b")
    assert ran.code == 1
    assert "E_PLAN" in ran.err
    assert "model.norm.weight" in ran.err
    assert not (tmp_path / "b").exists()
    assert run("convert", a, tmp_path / "b", "--names", "checkpoint").code == 0


@pytest.mark.parametrize(
    "args",
    [
        ["--to", "gguf"],
        ["--tp", "0"],
        ["--tp", "2"],
        ["--max-shard-size", "big"],
        ["--names", "mine"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_a_usage_error(
    run: Run, a: Path, tmp_path: Path, args: list[str]
) -> None:
    assert run("convert", a, tmp_path / "b", *args).code == 2
    assert run("convert", a).code == 2


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("500MiB", 500 << 20),
        ("1.5 GiB", 3 << 29),
        ("10kb", 10_000),
        ("4096", 4096),
        ("7B", 7),
        ("2T", 2 * 10**12),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert byte_size(None, None, text) == size  # type: ignore[arg-type]


def test_diff_of_equals_ends_with_0(run: Run, a: Path, tmp_path: Path) -> None:
    run("convert", a, tmp_path / "b", "--to", "sharded_state", "--tp", 2)
    ran = run("diff", a, tmp_path / "b")
    assert ran.code == 0, ran.err
    assert "equal: 12 tensors compared" in ran.out
    said = run("diff", a, tmp_path / "b", "--json").json()
    assert (said["schema"], said["equal"], said["ok"]) == ("loadkit.diff/1", True, True)
    assert said["names"] == "model"


def test_diff_names_what_differs_and_ends_with_1(run: Run, a: Path, tmp_path: Path) -> None:
    state = read(a)
    state["model.norm.weight"] = state["model.norm.weight"] + 1e-3
    state["\x1b[31mred"] = torch.ones(1)
    write_st(tmp_path / "b.safetensors", {**state, "more": torch.ones(2)})
    del state["\x1b[31mred"]
    state["lm_head.weight"] = state["lm_head.weight"][:3]
    write_st(tmp_path / "c.safetensors", state)
    ran = run("diff", a, tmp_path / "c.safetensors")
    assert ran.code == 1
    for words in ("model.norm.weight", "lm_head.weight", "values", "shape", "2 difference(s)"):
        assert words in ran.out
    assert run("diff", a, tmp_path / "c.safetensors", "--tolerance", 1e-2).code == 1
    said = run("diff", a, tmp_path / "c.safetensors", "--json").json()
    assert {one["what"] for one in said["different"]} == {"shape", "values"}
    assert run("diff", a, tmp_path / "b.safetensors").code == 1  # a name that is refused


def test_diff_reads_each_side_by_its_own_options(run: Run, a: Path, tmp_path: Path) -> None:
    """What was converted out of a dict in a pickle is proved against it."""
    (tmp_path / "n").mkdir()
    shutil.copy(a / "config.json", tmp_path / "n")
    torch.save({"model": {"sd": read(a)}, "step": 3}, tmp_path / "n/ck.pt")
    deep = "weights_key=model/sd"
    assert run("convert", tmp_path / "n", tmp_path / "b", "--set", deep).code == 0
    assert run("diff", tmp_path / "n", tmp_path / "b", "--set", deep).code == 2
    assert run("diff", tmp_path / "n", tmp_path / "b", "--set-a", deep).code == 0
    ran = run("diff", tmp_path / "b", tmp_path / "n", "--set-b", deep, "--json")
    assert ran.json()["equal"] is True
    ran = run("diff", a, a, "--set-a", "dtype=float16")
    assert ran.code == 2 and "--set-a and --set-b has no option 'dtype'" in ran.err


def test_verify_ends_with_0_or_1(run: Run, a: Path, tmp_path: Path) -> None:
    run("convert", a, tmp_path / "b")
    ran = run("verify", tmp_path / "b", "--finite", "--against", a)
    assert ran.code == 0, ran.err
    assert ran.out.rstrip().endswith("ok")
    path = tmp_path / "b/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ran = run("verify", tmp_path / "b")
    assert ran.code == 1
    assert "BAD" in ran.out
    assert "E_VERIFY: 1 problem(s)" in ran.err
    said = run("verify", tmp_path / "b", "--json").json()
    assert (said["schema"], said["ok"]) == ("loadkit.verify/1", False)
    assert [problem["code"] for problem in said["problems"]] == ["DIGEST"]
    assert run("verify", tmp_path / "nowhere").code == 1


def test_hostile_names_reach_no_terminal(run: Run, tmp_path: Path) -> None:
    names = ["‮gnp.exe", "a\u200bb", "x" * 900, "‏"]
    write_st(tmp_path / "a.safetensors", {name: torch.ones(1) for name in names})
    write_st(tmp_path / "b.safetensors", {name: torch.zeros(1) for name in names})
    for args in (["diff", "a", "b"], ["convert", "a", "c"], ["verify", "a", "--against", "b"]):
        files = [
            tmp_path / (f"{arg}.safetensors" if arg in "ab" else arg) if len(arg) == 1 else arg
            for arg in args[1:]
        ]
        run(args[0], *files).assert_clean()
        run(args[0], *files, "--json").assert_clean()
