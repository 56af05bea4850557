"""A folder: its metadata, the tensors that are the model's, and where their bytes are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from loadkit.detect import no_weights
from loadkit.errors import FormatError, ReadError
from loadkit.file_checks import show
from loadkit.tensor_info import torch_dtype
from loadkit.torch_archive.errors import damaged
from loadkit.tracing.lazy_tensor import LazyTensor, Offered
from loadkit.tracing.storage import FileLeaf, Storage, Unwritten, Value, Write
from loadkit.tracing.view import contiguous
from loadkit_dcp.items import Item, ItemReader
from loadkit_dcp.metadata import Box, Metadata, Place, Tensor, read_metadata
from loadkit_dcp.partition import fault_of
from loadkit_dcp.select import choose

if TYPE_CHECKING:
    import torch

    from loadkit.base_loader import Checksum
    from loadkit.sources.base import File, Source

__all__ = ["METADATA", "Checkpoint", "is_metadata", "open_checkpoint"]

METADATA = ".metadata"
_OF_RANK = re.compile(r"__\d{1,7}\.metadata")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds for a model.

    Attributes:
        tensors: by the model's names, in file order; each with the items of its boxes.
        files: the data files that they lie in.
        skipped: dicts and entries that are not read, with the reason.
    """

    tensors: dict[str, list[tuple[Box, Item]]]
    shapes: dict[str, Tensor]
    files: tuple[str, ...]
    skipped: dict[str, str] = field(default_factory=dict)

    def offers(self) -> Iterator[tuple[str, torch.Tensor | Offered]]:
        """Every tensor as (name, what it is), nothing read; new ones each time.

        Raises:
            FormatError: E_DTYPE, this torch lacks a dtype.
        """
        for name, items in self.tensors.items():
            tensor = self.shapes[name]
            if len(items) == 1 and items[0][1].odd is None:
                yield name, Offered(replace(items[0][1].info, name=name))
            else:
                yield name, _assembled(name, tensor, items)

    def checksums(self, file: str) -> list[Checksum]:
        """What a data file keeps of its bytes, as far as they were looked at, in order."""
        found = {
            each
            for items in self.tensors.values()
            for _, item in items
            if item.info.file.name == file
            for each in item.checksums
        }
        return sorted(found, key=lambda each: each[:2])


def _assembled(name: str, tensor: Tensor, items: list[tuple[Box, Item]]) -> LazyTensor:
    """A tensor that does not exist, every box of it written from a file."""
    dtype = torch_dtype(tensor.dtype)
    view = contiguous(tensor.size, dtype.itemsize)
    whole = Storage(Unwritten(f"checkpoint tensor {name}"), view.numel, view.itemsize)
    for box, item in items:
        region = view
        for dim, (start, length) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            region = region.narrow(dim, start, length)
        info = replace(item.info, name=name)
        if item.odd is not None:
            value = replace(item.odd, info=replace(item.odd.info, name=name)).tensor().lazy_value()
        else:
            leaf = FileLeaf(info, name, box.sizes, dtype)
            held = Storage.of_leaf(leaf)
            value = Value(held, 0, contiguous(box.sizes, dtype.itemsize), dtype)
        whole.writes.append(Write(region, dtype, value))
    return LazyTensor(whole, view, dtype)


def is_metadata(name: str) -> bool:
    """Whether a file says what the folder holds: for all ranks, or for the one that wrote it."""
    return name == METADATA or _OF_RANK.fullmatch(name) is not None


def open_checkpoint(source: Source, weights_key: str | None) -> Checkpoint:
    """Read a folder's metadata, and of every tensor that is the model's what its items say.

    Args:
        source: an open source.
        weights_key: of ``LoadConfig``.

    Raises:
        NoWeightsError: there is no metadata.
        FormatError: the metadata or an item breaks a rule; boxes overlap or leave a hole.
        PathError, ReadError, TruncatedError: a data file is missing, or shorter than is said.
        OptionError: nothing is under ``weights_key``.
    """
    found = [read_metadata(source.open(name)) for name in _metadata_files(source)]
    first = found[0].file.name
    paths = {name: path for one in found for name, path in one.paths.items()}
    chosen = choose(paths, weights_key, first)
    tensors = {name: _joined(found, name) for name in chosen.names}
    for tensor in tensors.values():
        fault = fault_of(tensor.size, tensor.boxes)
        if fault is not None:
            raise damaged(
                "E_LAYOUT",
                first,
                f"tensor {show(tensor.name)} is {list(tensor.size)}, and its element "
                f"{list(fault.at)} {fault.what}",
                offset=tensor.at,
                tensor=tensor.name,
                index=list(fault.at),
            )
    reader = ItemReader()
    for data, places in _places(source, tensors.values()):
        reader.expect(data, places)
    items: dict[str, list[tuple[Box, Item]]] = {}
    shapes: dict[str, Tensor] = {}
    for tensor in sorted(tensors.values(), key=_in_file_order):
        name = chosen.names[tensor.name]
        shapes[name] = tensor
        items[name] = [(box, _item(source, reader, tensor, box)) for box in tensor.boxes]
    files = {item.info.file.name for parts in items.values() for _, item in parts}
    others = {name: "no tensor, and never unpickled" for one in found for name in one.others}
    skipped = _grouped(others) | chosen.skipped
    return Checkpoint(items, shapes, tuple(sorted(files)), skipped)


def _metadata_files(source: Source) -> list[str]:
    """``.metadata``, or where ranks wrote one each, theirs."""
    listing = source.list()
    names = [info.name for info in listing]
    if METADATA in names:
        return [METADATA]
    ranks = [name for name in names if _OF_RANK.fullmatch(name)]
    if ranks:
        return sorted(ranks, key=lambda name: int(name[2:].partition(".")[0]))
    data = [name for name in names if name.endswith(".distcp")]
    if data:
        raise FormatError(
            f"{len(data)} file(s) like {show(data[0])} are there, and no {METADATA}, which says "
            "what is in them",
            code="E_STRUCTURE",
            file=METADATA,
            detail={"files": data[:20]},
            hint="name the folder, and none of its files; a save that was not finished leaves no "
            f"{METADATA}, and a copy may have left it out, for its name begins with a dot",
        )
    raise no_weights(listing, "dcp", [METADATA, "*.distcp"])


def _joined(found: Sequence[Metadata], name: str) -> Tensor:
    """One tensor as all metadata files say it is; a box that several ranks wrote counts once."""
    known = [one.tensor(name) for one in found if name in one.paths]
    first = known[0]
    if len(known) == 1:
        return first
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}
    for tensor in known:
        if (tensor.dtype, tensor.size) != (first.dtype, first.size):
            raise damaged(
                "E_LAYOUT",
                METADATA,
                f"tensor {show(name)} is {first.dtype} {list(first.size)} by one rank, and "
                f"{tensor.dtype} {list(tensor.size)} by another",
                tensor=name,
            )
        for box in tensor.boxes:
            boxes.setdefault((box.offsets, box.sizes), box)
    return replace(first, boxes=tuple(boxes.values()))


def _places(source: Source, tensors: Iterable[Tensor]) -> Iterator[tuple[File, list[Place]]]:
    """What will be asked of each data file."""
    found: dict[str, list[tuple[Tensor, Place]]] = {}
    for tensor in tensors:
        for box in tensor.boxes:
            if box.place is not None:
                found.setdefault(box.place.file, []).append((tensor, box.place))
    for name, wanted in sorted(found.items()):
        tensor, place = min(wanted, key=lambda one: one[1].offset)
        yield _opened(source, tensor, name, place.offset), [place for _, place in wanted]


def _in_file_order(tensor: Tensor) -> tuple[str, int]:
    places = [box.place for box in tensor.boxes if box.place is not None]
    return min(((place.file, place.offset) for place in places), default=("", 0))


def _item(source: Source, reader: ItemReader, tensor: Tensor, box: Box) -> Item:
    place = box.place
    if place is None:
        raise damaged("E_LAYOUT", METADATA, "a box is nowhere", tensor=tensor.name)
    return reader.item(_opened(source, tensor, place.file, place.offset), tensor, box, place)


def _opened(source: Source, tensor: Tensor, name: str, offset: int) -> File:
    try:
        return source.open(name)
    except ReadError as error:
        if error.errno is None:
            raise
        _missing(error, tensor, name, offset)


def _missing(error: ReadError, tensor: Tensor, name: str, offset: int) -> NoReturn:
    raise ReadError(
        f"tensor {show(tensor.name)} is said to be in {show(name)}: {error.message}",
        errno=error.errno,
        file=name,
        tensor=tensor.name,
        offset=offset,
        hint="copy the missing file, or save the checkpoint again",
    ) from error


def _grouped(others: dict[str, str]) -> dict[str, str]:
    """Entries that are no tensors; of many only how many there are."""
    if len(others) <= 100:
        return others
    return {f"{len(others)} entries": "no tensors, and never unpickled"}
