"""Ranks as real processes: they compute together, fail as one, and none is left behind."""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.rank_jobs import Unpicklable
from loadkit import ModelRegistry
from loadkit.config import ParallelConfig
from loadkit.errors import (
    DistributedError,
    FormatError,
    LoadkitError,
    OptionError,
    ReadError,
    ResourceError,
)
from loadkit.generate import greedy
from loadkit.launch import Patience, run_ranks
from loadkit.rank_failures import Failure, describe, ended, name_of, root_cause

SHORT = Patience(start=120, silence=4, collective=4)


def world(tp: int) -> list[ParallelConfig]:
    return [ParallelConfig.for_rank(rank, tp_size=tp) for rank in range(tp)]


@dataclass
class Launch:
    """Runs ranks and remembers their processes."""

    pids: dict[int, int] = field(default_factory=dict)

    def run(self, job: str, tp: int = 2, **arguments: Any) -> list[Any]:
        return run_ranks(
            f"helpers.rank_jobs:{job}", arguments, world(tp), patience=SHORT, on_message=self.hear
        )

    def hear(self, rank: int, message: Any) -> None:
        assert message[0] == "pid"
        self.pids[rank] = message[1]


def is_gone(pid: int) -> bool:
    """Whether a process that is nobody's child here ends (its new parent may reap it late)."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def launch() -> Iterator[Launch]:
    """A launcher, after which no process is left."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    made = Launch()
    yield made
    after = {process.pid for process in psutil.Process().children(recursive=True)}
    assert after <= before
    assert not [pid for pid in made.pids.values() if psutil.pid_exists(pid)]


def test_REG_02_ranks_compute_together_and_know_what_they_were_told(launch: Launch) -> None:
    ModelRegistry.register_model("RankToyForCausalLM", "loadkit_models.llama:LlamaForCausalLM")
    found = launch.run("job", extra={"a": [1]})
    assert [each["rank"] for each in found] == [0, 1]
    assert [each["sum"] for each in found] == [3.0, 3.0]
    assert [each["extra"] for each in found] == [{"a": [1]}] * 2
    assert all(each["registered"] for each in found)
    assert [each["environment"] for each in found] == [[], []]
    assert all(each["group"] == each["pid"] for each in found)
    assert launch.pids == {each["rank"]: each["pid"] for each in found}


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("typed", FormatError, r"^rank 1 of 2: a header is torn$"),
        ("killed", DistributedError, r"^rank 1 of 2: its process was killed by SIGKILL"),
        ("stopped", DistributedError, r"^rank 1 of 2: .* no sign of life .*; it is stopped"),
        ("leaves", DistributedError, r"^rank 1 of 2: .* exit code 0 .*; it said: so long$"),
        ("sleeps", DistributedError, r"^rank 1 of 2 kept rank 0 of 2 waiting"),
        ("grandchild", LoadkitError, r"^rank 1 of 2: it started a process$"),
    ],
)
def test_one_failed_rank_is_the_one_cause(
    launch: Launch, how: str, kind: type[LoadkitError], words: str
) -> None:
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        launch.run("fail_on", who=1, how=how)
    assert type(caught.value) is kind
    assert re.search(words, str(caught.value))
    assert caught.value.exit_code == 1
    assert time.monotonic() - started < 60  # of which the interpreters' start is most
    assert sorted(launch.pids) == [0, 1]
    if how == "typed":
        assert (caught.value.code, caught.value.offset) == ("E_HEADER", 8)
        assert isinstance(caught.value.__cause__, ValueError)
        assert "rank_jobs.py" in "".join(caught.value.__notes__)
    if how == "grandchild":
        assert is_gone(caught.value.detail["pid"])


def test_REG_02_registrations_that_do_not_travel_and_a_function_that_is_not_there_are_told(
    launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    class Here(torch.nn.Module):
        """A class that no other process can import."""

    ModelRegistry.register_model("HereForCausalLM", Here)
    with pytest.raises(DistributedError, match=r"rank 0 of 1: .*no_such_job"):
        launch.run("no_such_job", tp=1)
    assert "will not have architecture 'HereForCausalLM'" in caplog.text
    assert 'register "module:Class"' in caplog.text


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ranks_say_the_tokens_that_one_says(tmp_path: Path, launch: Launch, tp: int) -> None:
    write_llama(tmp_path)
    expected = greedy(loadkit.load_model(tmp_path), [1, 2, 3], max_new_tokens=12)
    arguments = {
        "source": str(tmp_path),
        "options": {},
        "prompt_ids": [1, 2, 3],
        "max_new_tokens": 12,
        "eos_ids": frozenset(),
    }
    said: list[int] = []
    found = run_ranks(
        "loadkit.generation:speak",
        arguments,
        world(tp),
        on_message=lambda _, token: said.append(token),
    )
    assert found == [expected] * tp
    assert said == expected


def test_fewer_devices_than_ranks_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for device, words in (("cuda", "2 CUDA devices"), ("cuda:0", "cuda:0"), ("meta", "meta")):
        with pytest.raises(OptionError, match=words):
            run_ranks("x:y", {}, world(2), device=device)


# -- which failure is the cause -------------------------------------------------------------------

NAMES = [name_of(place) for place in world(3)]


def test_who_was_left_alone_is_not_the_cause() -> None:
    gone = describe(RuntimeError("[gloo/tcp/pair.cc] Connection closed by peer"), 0)
    cause = describe(FormatError("torn", code="E_HEADER"), 2)
    error = root_cause([gone, cause], [1], NAMES)
    assert (error.code, str(error)) == ("E_HEADER", "rank 2 of 3: torn")


def test_the_earliest_of_several_causes_is_told() -> None:
    late, early = (Failure(rank, FormatError(str(rank)), when=-rank) for rank in (0, 1))
    assert str(root_cause([late, early], [], NAMES)) == "rank 1 of 3: 1"


def test_a_timeout_of_something_else_blames_nobody_else() -> None:
    alone = describe(RuntimeError("the bucket timed out"), 0)
    assert "rank 0 of 3: RuntimeError: the bucket" in str(root_cause([alone], [1, 2], NAMES))


def test_a_dead_rank_is_the_cause_of_the_others_errors() -> None:
    gone = describe(torch.distributed.DistNetworkError("broken"), 0)
    error = root_cause([gone, ended(1, -11, "", started=True)], [2], NAMES)
    assert str(error).startswith("rank 1 of 3: its process was killed by SIGSEGV")


def test_only_lonely_ranks_tell_the_first_of_themselves() -> None:
    failures = [describe(RuntimeError("gloo: Connection reset by peer"), rank) for rank in (0, 1)]
    assert "rank 0 of 3: RuntimeError" in str(root_cause(failures, [2], NAMES))


def test_a_rank_that_has_places_on_several_axes_is_named_by_them() -> None:
    place = ParallelConfig.for_rank(3, tp_size=2, pp_size=2)
    assert name_of(place) == "rank 3 of 4 (pp 1, tp 1)"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), ResourceError),
        (FileNotFoundError(2, "No such file", "x.st"), ReadError),
        (KeyError("layers"), DistributedError),
        (KeyboardInterrupt(), DistributedError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_what_is_not_ours_gets_a_type(error: BaseException, kind: type[LoadkitError]) -> None:
    failure = pickle.loads(pickle.dumps(describe(error, 0)))
    assert type(failure.error) is kind
    assert type(failure.error.__cause__) is type(error)


def test_an_error_that_does_not_unpickle_travels_as_its_base() -> None:
    failure = describe(Unpicklable("so", code="E_NAME", tensor="t", detail=object()), 0)
    found = pickle.loads(pickle.dumps(failure)).error
    assert type(found) is FormatError
    assert (found.message, found.code, found.tensor) == ("so", "E_NAME", "t")


def test_a_cause_that_does_not_unpickle_is_told_in_words() -> None:
    error = FormatError("so")
    error.__cause__ = Unpicklable("because")
    found = pickle.loads(pickle.dumps(describe(error, 0))).error
    assert str(found.__cause__) == "Unpicklable: because"


def test_a_crash_is_told_by_its_place() -> None:
    output = (
        "Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):\n"
        '  File "a.py", line 1 in wait\n\nCurrent thread 0x2 (most recent call first):\n'
        '  File "b.py", line 7 in kernel\n\nExtension modules: numpy\n'
    )
    assert 'at File "b.py", line 7 in kernel' in str(ended(0, -11, output, started=True).error)
