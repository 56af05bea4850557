"""``auto`` maps local files nobody else can write, reads all others, and says why."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import loadkit
from helpers.checkpoints import write_llama
from helpers.extents import content
from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ReadError, UsageError
from loadkit.readers import Surroundings, can_alias, choose_reader, file_systems
from loadkit.readers import mmap as mapping
from loadkit.readers.base import Place
from loadkit.readers.mmap import MmapReader
from loadkit.sources.base import File
from loadkit.sources.local_file import LocalFile


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    path = tmp_path / "weights.bin"
    path.write_bytes(content(5000))
    path.chmod(0o644)
    opened = LocalFile("weights.bin", str(path))
    yield opened
    opened.close()


@pytest.fixture
def _local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_systems, "file_system_of", lambda path, device: "ext4")


class RemoteFile(File):
    """A file without a path, as a remote source gives."""

    name = "far/weights.bin"

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.data[offset : offset + nbytes]

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.usefixtures("_local")
def test_auto_maps_local_files_that_nobody_else_can_write(file: LocalFile) -> None:
    choice = choose_reader(LoadConfig(), [file], "cpu")
    assert choice.reader.name == "mmap"
    assert "nobody else can write" in choice.why
    choice.reader.close()


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize(
    ("load_config", "device", "why"),
    [
        (LoadConfig(alias="never"), "cpu", "alias is 'never'"),
        (LoadConfig(), "cuda:0", "weights go to cuda:0"),
    ],
)
def test_auto_reads_into_owned_memory_where_views_are_not_wanted(
    file: LocalFile, load_config: LoadConfig, device: str, why: str
) -> None:
    choice = choose_reader(load_config, [file], device)
    assert choice.reader.name == "pread"
    assert why in choice.why


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_a_file_that_others_can_write_is_not_mapped(file: LocalFile, mode: int) -> None:
    Path(file.path).chmod(mode)
    assert can_alias(file) == (False, f"others may write it (mode {mode:o})")
    choice = choose_reader(LoadConfig(), [file], "cpu")
    assert choice.reader.name == "pread"
    assert choice.why.startswith("weights.bin: others may write it")


@pytest.mark.usefixtures("_local")
def test_a_file_of_another_user_is_not_mapped(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.stat(file.path).st_uid  # noqa: PTH116
    if owner == 0:
        os.chown(file.path, 12345, -1)
        owner = 12345
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert can_alias(file) == (False, f"user {owner} owns it and may write it")


def test_a_file_that_is_not_here_is_asked_for_by_ranges() -> None:
    import torch

    from loadkit.readers.base import Extent

    remote = RemoteFile(content(1000))
    choice = choose_reader(LoadConfig(), [remote], "cpu")
    assert (choice.reader.name, choice.why) == (
        "range",
        "remote files: ranges of them are requested",
    )
    dest = torch.zeros(300, dtype=torch.uint8)
    assert choice.reader.read([Extent(remote, 7, 100, 3, 200, dest, 100, "t")]) == 500
    assert bytes(dest.numpy()) == b"".join(remote.data[7 + 200 * n :][:100] for n in range(3))


@pytest.mark.usefixtures("_local")
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENODEV])
def test_fault_7_a_mapping_that_is_refused_falls_back_to_reading(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(mmap, "mmap", refuse)
    choice = choose_reader(LoadConfig(), [file], "cpu")
    assert choice.reader.name == "pread"
    assert os.strerror(number) in choice.why


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENODEV])
def test_fault_7_a_mapping_that_was_asked_for_and_is_refused_is_an_error_that_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_llama(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        fallen_back = loadkit.load(tmp_path)
        with pytest.raises(ReadError) as caught:
            loadkit.load(tmp_path, load_config=LoadConfig(reader="mmap"))
    assert (fallen_back.report.reader, fallen_back.report.aliased_bytes) == ("pread", 0)
    assert (caught.value.errno, caught.value.hint) == (number, "choose the reader 'pread'")


def test_a_named_reader_is_taken_as_named(file: LocalFile) -> None:
    for name in ("pread", "mmap"):
        choice = choose_reader(LoadConfig(reader=name), [file], "cpu")
        assert (choice.reader.name, choice.why) == (name, "asked for by name")


def test_an_unknown_reader_is_a_usage_error(file: LocalFile) -> None:
    with pytest.raises(UsageError, match="nvmee"):
        choose_reader(LoadConfig(reader="nvmee"), [file], "cpu")


MOUNTS = r"""22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 0:50 / /models rw,relatime shared:2 master:1 - nfs4 server:/models rw
41 40 0:51 / /models/fast rw - tmpfs tmpfs rw
42 27 0:52 / /with\040space rw - fuse.sshfs host: rw
43 27 0:53 / /odd-name rw,opt-x - overlay - rw
garbage
"""


@pytest.mark.parametrize(
    ("path", "device", "kind"),
    [
        ("/anything", os.makedev(0, 50), "nfs4"),
        ("/anything", os.makedev(254, 0), "ext4"),
        ("/models/a/b", os.makedev(9, 9), "nfs4"),
        ("/models/fast/b", os.makedev(9, 9), "tmpfs"),
        ("/modelsfast/b", os.makedev(9, 9), "ext4"),
        ("/with space/b", os.makedev(9, 9), "fuse.sshfs"),
        ("/odd-name/b", os.makedev(9, 9), "overlay"),
    ],
)
def test_the_file_system_is_found_by_device_and_else_by_the_longest_mount_point(
    tmp_path: Path, path: str, device: int, kind: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    assert file_systems.file_system_of(path, device, mounts) == kind


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.gcsfuse", "lustre", "9p", "virtiofs", ""])
def test_network_and_unknown_file_systems_are_not_mapped(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(file_systems, "file_system_of", lambda path, device: kind)
    allowed, why = can_alias(file)
    assert not allowed
    assert (kind or "unknown") in why


def test_the_file_system_is_asked_once_of_each_open_file(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(path: str, device: int) -> str:
        asked.append(path)
        return "ext4" if len(asked) == 1 else "nfs4"

    monkeypatch.setattr(file_systems, "file_system_of", ask)
    assert [file_systems.kind_of(file), file_systems.kind_of(file)] == ["ext4", "ext4"]
    again = LocalFile("weights.bin", file.path)
    assert file_systems.kind_of(again) == "nfs4"
    assert asked == [file.path] * 2
    again.close()


def test_no_mount_table_means_an_unknown_file_system(tmp_path: Path) -> None:
    assert file_systems.file_system_of("/x", 1, tmp_path / "missing") == ""


# ------------------------------------------------------------ what else auto looks at


def around(**changes: Any) -> Surroundings:
    """A machine with a warm local file system and much memory, but for the changes."""
    plain: dict[str, Any] = {
        "kind": lambda file: "ext4",
        "cached": lambda files: 1.0,
        "memory": lambda: 1 << 40,
        "direct": lambda file: True,
    }
    return Surroundings(**(plain | changes))


NETWORKS = ["nfs4", "nfs", "lustre", "fuse.gcsfuse", "fuse.juicefs", "cifs", "ceph", ""]


@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_SPD_01_auto_never_maps_a_file_system_whose_faults_may_block(
    file: LocalFile, kind: str, cached: float
) -> None:
    machine = around(kind=lambda file: kind, cached=lambda files: cached)
    choice = choose_reader(LoadConfig(), [file], "cpu", around=machine)
    assert choice.reader.name == "pread"
    place = Place(file, 0, 8, 1, 8)
    assert not choice.reader.maps(place)  # neither for casts nor for strided copies
    assert f"its file system ({kind or 'unknown'}) is not known to be local" in choice.why
    assert f"{cached:.0%} of them is in the page cache" in choice.why


@pytest.mark.parametrize("dtype", ["auto", "float64"], ids=["strided copies", "casts"])
@pytest.mark.parametrize("reader", ["auto", "mmap"])
def test_SPD_01_a_load_from_a_network_touches_no_page_of_a_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, reader: str
) -> None:
    write_llama(tmp_path)
    parallel = ParallelConfig(tp_size=2, tp_rank=1)
    config = LoadConfig(reader=reader)
    near = loadkit.load(tmp_path, dtype=dtype, parallel=parallel, load_config=config)
    assert near.report.reader == "mmap"
    touched: list[int] = []
    view = MmapReader.view

    def watching(self: MmapReader, file: LocalFile, offset: int, nbytes: int) -> torch.Tensor:
        touched.append(nbytes)
        return view(self, file, offset, nbytes)

    monkeypatch.setattr(MmapReader, "view", watching)
    monkeypatch.setattr(mapping, "populate", lambda address, nbytes: touched.append(nbytes))
    monkeypatch.setattr(file_systems, "file_system_of", lambda path, device: "nfs4")
    far = loadkit.load(tmp_path, dtype=dtype, parallel=parallel, load_config=config)
    assert far.report.reader == ("pread" if reader == "auto" else "mmap")
    assert far.report.aliased_bytes == sum(touched) == 0
    assert far.report.bytes_read == far.plan.bytes_to_read
    for name, tensor in near.model.state_dict().items():
        assert torch.equal(far.model.state_dict()[name], tensor)


def test_SPD_01_the_choice_says_how_much_is_cached(file: LocalFile) -> None:
    machine = around(cached=lambda files: 0.25)
    choice = choose_reader(LoadConfig(), [file], "cpu", around=machine)
    assert choice.reader.name == "mmap"
    assert choice.why.endswith("; 25% of them is in the page cache")
    unknown = choose_reader(LoadConfig(), [file], "cpu", around=around(cached=lambda files: None))
    assert "page cache" not in unknown.why
    choice.reader.close()
    unknown.reader.close()


COLD = {"cached": lambda files: 0.0, "memory": lambda: 9000}


def test_cold_files_that_do_not_fit_beside_the_weights_go_past_the_page_cache(
    file: LocalFile,
) -> None:
    owned = LoadConfig(alias="never")
    choice = choose_reader(owned, [file], "cpu", around=around(**COLD))
    assert choice.reader.name == "direct"
    assert choice.why == (
        "alias is 'never': all memory is owned; past the page cache, which has 0% of 5,000 bytes "
        "and no room for them: 9,000 bytes of memory are available"
    )
    choice.reader.close()


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        pytest.param({"cached": lambda files: 0.2}, {}, id="partly cached"),
        pytest.param({"cached": lambda files: None}, {}, id="nobody knows what is cached"),
        pytest.param({"memory": lambda: 10_000}, {}, id="there is room"),
        pytest.param({"memory": lambda: None}, {}, id="nobody knows the room"),
        pytest.param({"direct": lambda file: False}, {}, id="no O_DIRECT"),
        pytest.param({"kind": lambda file: "nfs4"}, {}, id="a network"),
        pytest.param({}, {"ranks": 2}, id="other ranks read it too"),
        pytest.param({}, {"device": "cuda"}, id="the weights are not in this memory"),
    ],
)
def test_otherwise_they_are_read_through_it(
    file: LocalFile, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    owned, machine = LoadConfig(alias="never"), around(**(COLD | changes))
    device = options.pop("device", "cpu")
    choice = choose_reader(owned, [file], device, around=machine, **options)
    assert choice.reader.name == "pread"
    choice.reader.close()


def test_views_need_no_room(file: LocalFile) -> None:
    choice = choose_reader(LoadConfig(), [file], "cpu", around=around(**COLD))
    assert choice.reader.name == "mmap"
    choice.reader.close()


def test_of_many_files_a_few_are_asked_about(file: LocalFile) -> None:
    asked: list[int] = []
    machine = around(cached=lambda files: asked.append(len(files)) or 1.0)
    choose_reader(LoadConfig(alias="never"), [file] * 163, "cpu", around=machine).reader.close()
    assert asked and 16 <= asked[0] <= 32


def test_a_load_tells_why_and_how_it_read(tmp_path: Path) -> None:
    write_llama(tmp_path)
    result = loadkit.load(tmp_path, load_config=LoadConfig(reader="direct"))
    report = result.report.to_dict()
    assert (report["reader"], report["reader_why"]) == ("direct", "asked for by name")
    assert report["requests"] == result.plan.requests > 0
    assert result.report.bytes_read == result.plan.bytes_to_read > result.report.bytes_needed
    amplification = report["bytes_read"] / report["bytes_needed"]
    assert report["read_amplification"] == pytest.approx(amplification, abs=1e-4)
    assert result.plan.read_amplification == report["read_amplification"]
    mapped = loadkit.load(tmp_path).report
    assert mapped.read_amplification == 1.0
