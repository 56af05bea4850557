"""One item of a ``.distcp`` file: an archive of one tensor, and where in the file its bytes are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from loadkit.errors import FormatError, TruncatedError
from loadkit.file_checks import show
from loadkit.json_safe import parse_json
from loadkit.safetensors_format import SafetensorsHeader, read_header
from loadkit.sources.base import File
from loadkit.tensor_info import DTYPES, TensorInfo
from loadkit.torch_archive.container import checksums_of, read_contents
from loadkit.torch_archive.errors import damaged
from loadkit.torch_archive.lazies import OddTensor
from loadkit.torch_archive.tensors import Selected, place_tensors
from loadkit.torch_archive.values import TensorRef, kind_of
from loadkit.torch_archive.zip_directory import read_directory
from loadkit_dcp.windows import Windows, windows_of

if TYPE_CHECKING:
    from loadkit.base_loader import Checksum
    from loadkit_dcp.metadata import Box, Place, Tensor

__all__ = ["Item", "ItemReader", "Part"]

_MAX_HEADER = 100_000_000
_SHARDS = "DCP_SHARDING_INFO"
_AGAIN = "the file is damaged, incomplete or of another save; copy it again, or save it again"


class Part(File):
    """Some bytes of a file, as if they were one. ``windows``: ranges of it that are here."""

    def __init__(self, file: File, start: int, size: int, windows: Windows | None = None) -> None:
        self.name, self.path, self.size = file.name, file.path, size
        self._file, self._start, self._windows = file, start, windows

    @property
    def local(self) -> bool:
        """As the whole."""
        return self._file.local

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes from ``offset`` of the part.

        Raises:
            TruncatedError: they are not all in it.
        """
        if offset < 0 or offset + nbytes > self.size:
            raise TruncatedError(
                f"{show(self.name)}: {nbytes} bytes were asked for at byte {offset} of {self.size}",
                file=self.name,
                offset=self._start + offset,
            )
        at = self._start + offset
        found = None if self._windows is None else self._windows.read(at, nbytes)
        return self._file.read(at, nbytes) if found is None else found

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        """Nothing: the whole is closed by whoever opened it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A box's bytes.

    Attributes:
        info: named as the tensor; ``shape`` in elements of torch.
        odd: where its elements are not simply in order.
        checksums: what its archive keeps of its bytes.
    """

    info: TensorInfo
    odd: OddTensor | None = None
    checksums: tuple[Checksum, ...] = ()


class ItemReader:
    """Reads what items say of themselves; no byte of a tensor."""

    def __init__(self) -> None:
        self._windows: dict[str, Windows] = {}
        self._headers: dict[tuple[str, int], dict[str, TensorInfo]] = {}
        self._shards: dict[tuple[str, int], Mapping[str, Any]] = {}

    def expect(self, file: File, places: Iterable[Place]) -> None:
        """Of a remote file, fetch the ends of items that will be asked for.

        Raises:
            ReadFailure: the server, or the way to it, failed.
        """
        if not file.local:
            ends = [(place.offset, place.length) for place in places]
            self._windows[file.name] = windows_of(file, ends)

    def item(self, file: File, tensor: Tensor, box: Box, place: Place) -> Item:
        """A box's item, which has to be of the tensor's dtype and the box's size.

        Args:
            file: the open file of ``place``.
            tensor, box, place: what the metadata says.

        Raises:
            FormatError: E_ZIP, E_PICKLE, E_LAYOUT, ...: the item breaks a rule, or is another than
                the metadata says; always with file, tensor and offset.
            TruncatedError: the file ends before the item does.
        """
        if place.offset + max(place.length, 4) > file.size:
            raise TruncatedError(
                f"{show(file.name)} has {file.size} bytes; tensor {show(tensor.name)} is said to "
                f"have {place.length} from byte {place.offset}",
                file=file.name,
                tensor=tensor.name,
                offset=min(place.offset, file.size),
                detail={"expected": place.offset + place.length, "actual": file.size},
                hint=_AGAIN,
            )
        try:
            if self._part(file, place.offset, 2).read(0, 2) == b"PK":
                found = self._archived(file, tensor, place)
            else:
                found = self._listed(file, tensor, box, place)
        except (FormatError, TruncatedError) as error:
            raise _of_tensor(error, tensor.name, place) from error
        info = found.info
        if (info.dtype, info.shape) != (tensor.dtype, box.sizes):
            raise damaged(
                "E_LAYOUT",
                file.name,
                f"tensor {show(tensor.name)} is {tensor.dtype} {list(box.sizes)} by the metadata, "
                f"and {info.dtype} {list(info.shape)} in its item",
                offset=place.offset,
                tensor=tensor.name,
            )
        return found

    def _archived(self, file: File, tensor: Tensor, place: Place) -> Item:
        """An archive of ``torch.save``, of one tensor."""
        part = self._part(file, place.offset, place.length)
        records, directory = read_directory(part)
        contents = read_contents(part, records, directory)
        ref = contents.value
        if type(ref) is not TensorRef:
            _wrong(part, f"it holds {kind_of(ref)}, and no tensor")
        selected = Selected({tensor.name: ref}, {}, None)
        archive = place_tensors(selected, part, contents.places, big=contents.big, metadata={})
        info, odd = archive.tensors[0], archive.odd.get(tensor.name)
        moved = replace(info, file=file, offset=place.offset + info.offset)
        checksums = tuple(
            (place.offset + start, place.offset + end, crc)
            for start, end, crc in checksums_of(records.values())
        )
        if odd is not None:
            odd = replace(odd, info=moved)
        return Item(replace(moved, shape=ref.size), odd, checksums)

    def _listed(self, file: File, tensor: Tensor, box: Box, place: Place) -> Item:
        """A tensor of the safetensors file that lies in the file from ``place.offset`` on."""
        key = file.name, place.offset
        if key not in self._headers:
            header = read_header(self._part(file, place.offset, file.size - place.offset))
            self._headers[key] = {info.name: info for info in header.tensors}
            self._shards[key] = _shards(header, file.name)
        info = self._headers[key].get(tensor.name)
        said = self._shards[key].get(tensor.name)
        offsets = said.get("saved_offsets") if isinstance(said, dict) else None
        if info is None or (offsets is not None and offsets != list(box.offsets)):
            _wrong(file, f"no box at {list(box.offsets)} is in the safetensors file there")
        if info.nbytes != place.length:
            _wrong(file, f"it has {info.nbytes} bytes, and {place.length} are said")
        shape = info.shape
        if DTYPES[info.dtype][0] == 4:
            shape = (*shape[:-1], shape[-1] // 2)
        return Item(replace(info, file=file, offset=place.offset + info.offset, shape=shape))

    def _part(self, file: File, start: int, size: int) -> Part:
        return Part(file, start, size, self._windows.get(file.name))


def _shards(header: SafetensorsHeader, file: str) -> Mapping[str, Any]:
    """What a safetensors file says of where its tensors begin in the whole ones."""
    text = (header.metadata or {}).get(_SHARDS)
    if text is None:
        return {}
    found = parse_json(text.encode(), file=file, max_bytes=_MAX_HEADER)
    return found if isinstance(found, dict) else {}


def _of_tensor(
    error: FormatError | TruncatedError, tensor: str, place: Place
) -> FormatError | TruncatedError:
    """An error about an item with the whole file's offset, and the tensor's name."""
    inside = 0 if error.offset is None else error.offset
    offset = inside if isinstance(error, TruncatedError) else place.offset + inside
    return type(error)(
        f"tensor {show(tensor)}, in the item of {place.length} bytes from byte {place.offset}: "
        f"{error.message}",
        code=error.code,
        file=place.file,
        tensor=tensor,
        offset=offset,
        detail=error.detail,
        hint=error.hint,
    )


def _wrong(file: File, problem: str) -> NoReturn:
    """An item that is not what was said; at its first byte."""
    raise damaged("E_LAYOUT", file.name, problem, offset=0)
