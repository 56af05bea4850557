"""``loadkit_manifest.json``: what is written is read back, and nothing else is believed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadkit.config import LoadConfig, ParallelConfig
from loadkit.errors import ManifestError, OptionError
from loadkit.expert_placement import ExpertPlacement
from loadkit.load_plan import Region
from loadkit.manifest import (
    MANIFEST,
    Box,
    FileEntry,
    Manifest,
    Quantization,
    RankEntry,
    TensorEntry,
    Topology,
    WholeTensor,
    is_manifest_name,
    manifest_bytes,
    parse_manifest,
    read_manifest,
)
from loadkit.sources import open_source

DIGEST = "ab" * 32
BOX = Box("q.weight", Region(8, (2, 4), (4, 1)), Region(0, (2, 4), (4, 1)))
EXAMPLE = Manifest(
    layout="runtime",
    files={
        "model-rank-0-part-0.safetensors": FileEntry(
            1000,
            DIGEST,
            0,
            {
                "qkv.weight": TensorEntry("BF16", (4, 4), 128, DIGEST),
                "w13": TensorEntry("F32", (2, 4), 160, None, row=2, rows=4),
            },
        )
    },
    topology=Topology(tp=2, ep=2, experts=(1, 0)),
    dtype="bfloat16",
    architecture="LlamaForCausalLM",
    quantization=Quantization("gguf", {"tensors": [["a", "Q4_0", [4, 4]]]}),
    layout_versions={"Method": "3"},
    tensors={"q.weight": WholeTensor("BF16", (4, 4), "blk.0.q")},
    ranks=(RankEntry(0, {"head": "embed"}, {"qkv.weight": (BOX,)}, {"x": "computed"}),),
    source="somewhere",
    loadkit_version="0.1.0",
)


def test_what_is_written_is_read_back() -> None:
    assert parse_manifest(manifest_bytes(EXAMPLE)) == EXAMPLE
    assert manifest_bytes(EXAMPLE) == manifest_bytes(parse_manifest(manifest_bytes(EXAMPLE)))


def test_sizes_and_shapes_follow_from_the_entries() -> None:
    entries = EXAMPLE.files["model-rank-0-part-0.safetensors"].tensors
    assert entries["qkv.weight"].nbytes == 32
    assert entries["w13"].whole_shape == (4, 4)
    assert EXAMPLE.files_of(0) == EXAMPLE.files and EXAMPLE.files_of(1) == {}
    assert EXAMPLE.rank(0) is EXAMPLE.ranks[0] and EXAMPLE.rank(1) is None


def test_a_folder_without_a_manifest_has_none(tmp_path: Path) -> None:
    with open_source(tmp_path, LoadConfig()) as source:
        assert read_manifest(source) is None
    (tmp_path / MANIFEST).write_bytes(manifest_bytes(EXAMPLE))
    with open_source(tmp_path, LoadConfig()) as source:
        assert read_manifest(source) == EXAMPLE


def test_data_parallel_ranks_count_once_unless_experts_are_spread_over_them() -> None:
    parallel = ParallelConfig.for_rank(5, tp_size=2, dp_size=3)
    assert Topology.of(parallel) == Topology(tp=2)
    assert Topology.of(parallel).rank_of(parallel) == 1
    spread = ParallelConfig.for_rank(5, tp_size=2, dp_size=3, ep_size=6)
    assert Topology.of(spread) == Topology(tp=2, ep=6, dp=3)
    assert Topology.of(spread).rank_of(spread) == 5


def test_experts_in_order_are_no_placement_of_their_own() -> None:
    def placed(placement: ExpertPlacement) -> Topology:
        return Topology.of(ParallelConfig(tp_size=2, ep_size=2, expert_placement=placement))

    assert placed(ExpertPlacement.linear(4, 2)) == Topology(tp=2, ep=2)
    assert placed(ExpertPlacement.round_robin(4, 2)).experts == (0, 2, 1, 3)


def test_names_of_manifests_are_told_from_others() -> None:
    assert is_manifest_name(MANIFEST) and is_manifest_name("loadkit_manifest.rank-3.json")
    assert not is_manifest_name("config.json")


def test_a_layout_that_is_none_is_refused_before_it_is_written() -> None:
    with pytest.raises(OptionError, match="runtime-processed"):
        Manifest(layout="odd", files={})  # type: ignore[arg-type]


FILE = "files.model-rank-0-part-0.safetensors"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("schema", "loadkit.manifest/9", "schema"),
        ("schema", None, "schema"),
        ("layout", "odd", "layout"),
        ("layout", ["runtime"], "layout"),
        ("topology", None, "topology"),
        ("topology.tp", 0, "topology.tp"),
        ("topology.tp", True, "topology.tp"),
        ("topology.tp", 1 << 40, "topology.tp"),
        ("topology.ep", 3, "does not divide"),
        ("topology.experts", [-1], "experts"),
        ("dtype", 7, "dtype"),
        ("quantization", "gguf", "quantization"),
        ("quantization.method", None, "method"),
        ("layout_versions", {"a": 3}, "layout_versions"),
        ("files", [], "files"),
        ("files", {"../x": {"size": 1}}, "'..' part"),
        ("files", {"/x": {"size": 1}}, "absolute"),
        (f"{FILE}.size", -1, "size"),
        (f"{FILE}.size", 1.5, "size"),
        (f"{FILE}.size", 140, "ends at byte"),
        (f"{FILE}.sha256", "xyz", "SHA-256"),
        (f"{FILE}.rank", 1 << 30, "rank"),
        (f"{FILE}.tensors.w13.dtype", "F128", "no dtype"),
        (f"{FILE}.tensors.w13.dtype", ["F32"], "no dtype"),
        (f"{FILE}.tensors.w13.shape", [1 << 60], "shape"),
        (f"{FILE}.tensors.w13.shape", [1 << 40, 1 << 40], "too large"),
        (f"{FILE}.tensors.w13.shape", [1] * 9, "shape"),
        (f"{FILE}.tensors.w13.rows", 3, "rows past"),
        (f"{FILE}.tensors.w13.rows", None, "no rows"),
        ("tensors", {"": {"dtype": "F32", "shape": []}}, "name"),
        ("tensors", {"x" * 2000: {"dtype": "F32", "shape": []}}, "name"),
        ("tensors.q", {"dtype": "F32", "shape": [], "stored": 7}, "stored"),
        ("ranks", {}, "ranks"),
        ("ranks.0.rank", "0", "rank"),
        ("ranks.0.boxes", {"p": [["q"]]}, "size, source, target"),
        ("ranks.0.boxes", {"p": [["q", [2], [0], [0, 1]]]}, "strides"),
        ("ranks.0.boxes", {"p": [["q", [2], [0, -1], [0, 1]]]}, "integer"),
        ("ranks.0.tied", {"a": 1}, "tied"),
        ("ranks.0.unboxed", {"a": "x" * 5000}, "text"),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(path: str, value: Any, said: str) -> None:
    content: Any = json.loads(manifest_bytes(EXAMPLE))
    parts = path.split(".") if not path.startswith(FILE) else ["files", FILE[6:]]
    if path.startswith(FILE):
        parts += path[len(FILE) + 1 :].split(".")
    at = content
    for part in parts[:-1]:
        at = at[int(part)] if isinstance(at, list) else at[part]
    at[parts[-1]] = value
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(content).encode())
    assert caught.value.code == "E_MANIFEST" and caught.value.file == MANIFEST
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"{", b"[" * 9999, b'{"a":1,"a":2}', b'{"a":\xff}', b"\xef\xbb\xbf{}"],
    ids=["empty", "list", "null", "cut", "deep", "duplicate", "utf8", "bom"],
)
def test_what_is_no_manifest_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(data)


def test_a_rank_named_twice_is_refused() -> None:
    content: Any = json.loads(manifest_bytes(EXAMPLE))
    content["ranks"] *= 2
    with pytest.raises(ManifestError, match="twice"):
        parse_manifest(json.dumps(content).encode())
