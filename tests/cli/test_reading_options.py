"""The options of reading from the command line, over the real line."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.checkpoints import write_llama
from helpers.cli import Ran

Run = Callable[..., Ran]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADKIT_CACHE", str(tmp_path / "cache"))
    write_llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("settings", "reader", "why"),
    [
        (["safetensors_load_strategy=lazy"], "mmap", "'lazy'"),
        (["safetensors_load_strategy=eager"], "eager", "'eager'"),
        (
            [
                "safetensors_load_strategy=prefetch",
                "safetensors_prefetch_num_threads=2",
                "safetensors_prefetch_block_size=64KiB",
                "reader=pread",
            ],
            "pread",
            "prefetched into the page cache",
        ),
        (
            ['model_loader_extra_config={"enable_multithread_load": true, "num_threads": 3}'],
            "mmap",
            "",
        ),
        (["local_ranks=2", "verify=digest", "digest_store=none"], "mmap", ""),
    ],
    ids=["lazy", "eager", "prefetch", "multithread", "digest"],
)
def test_settings_reach_the_load(
    run: Run, model: Path, settings: list[str], reader: str, why: str
) -> None:
    flags = [word for setting in settings for word in ("--set", setting)]
    loaded = run("load", model, *flags, "--json")
    planned = run("plan", model, *flags, "--json")
    assert (loaded.code, planned.code) == (0, 0), loaded.err + planned.err
    (rank,) = loaded.json()["ranks"]
    assert rank["reader"] == reader and why in rank["reader_why"]
    assert rank["bytes_read"] == planned.json()["ranks"][0]["bytes_to_read"]


def test_digests_of_a_first_load_are_compared_by_the_next(run: Run, model: Path) -> None:
    command = ("load", model, "--set", "verify=digest", "--json")
    (first,), (second,) = run(*command).json()["ranks"], run(*command).json()["ranks"]
    size = (model / "model.safetensors").stat().st_size
    assert (first["verified"]["compared_bytes"], first["verified"]["recorded_bytes"]) == (0, size)
    assert (second["verified"]["compared_bytes"], second["verified"]["recorded_bytes"]) == (size, 0)


def test_a_wrong_bit_is_an_error_of_the_checkpoint(run: Run, model: Path) -> None:
    command = ("load", model, "--set", "verify=digest")
    assert run(*command).code == 0
    path = model / "model.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    ran = run(*command)
    assert ran.code == 1
    assert "model.safetensors" in ran.err and "SHA-256" in ran.err
    ran.assert_clean()


@pytest.mark.parametrize(
    "settings",
    [
        ("safetensors_load_strategy=torchao",),
        ("safetensors_load_strategy=eager", "reader=mmap"),
        ("digest_store=none",),
        ('model_loader_extra_config={"num_threads": 3}',),
        ("verify=sha",),
    ],
)
def test_what_cannot_be_is_a_usage_error(run: Run, model: Path, settings: tuple[str, ...]) -> None:
    ran = run("load", model, *(word for item in settings for word in ("--set", item)))
    assert ran.code == 2 and "Traceback" not in ran.err
