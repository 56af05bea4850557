"""The hashes of a plain file, as what every load holds its bytes against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from loadkit.file_checks import show
from loadkit.integrity.digests import FileDigests

if TYPE_CHECKING:
    from loadkit.integrity.digests import Hash
    from loadkit.sources.base import File
    from loadkit_tensorizer.tensor_header import TensorHeader

__all__ = ["digests_of"]


def digests_of(file: File, headers: Sequence[TensorHeader]) -> FileDigests:
    """A unit for each tensor's data; its hash has taken the tensor's header already.

    Of several hashes the strongest counts. Weak ones, and tensors with hashes of unknown types
    alone, are a remark.
    """
    stored = [header for header in headers if header.entry.nbytes]

    def begin(number: int) -> Hash:
        return stored[number].hash()

    return FileDigests(
        file,
        origin="the tensor's own header",
        advice="the file is damaged: download or copy it again",
        starts=[header.entry.start for header in stored],
        ends=[header.entry.end for header in stored],
        digests=[header.digest for header in stored],
        begin=begin,
        code="E_HASH",
        remark=_remark(file, headers),
    )


def _remark(file: File, headers: Sequence[TensorHeader]) -> str:
    weak = [header for header in headers if header.is_weak and header.digest is not None]
    unknown = [header for header in headers if header.digest is None]
    said = []
    if weak:
        first = show(weak[0].entry.name)
        said.append(f"{len(weak)} tensor(s) have a CRC-32 only, the first {first}: that is weak")
    if unknown:
        first, types = show(unknown[0].entry.name), sorted({t for h in unknown for t in h.others})
        said.append(
            f"{len(unknown)} tensor(s) are not verified, the first {first}: their hashes are of "
            f"unknown types {types}: that is weak"
        )
    return f"{show(file.name)}: {'; '.join(said)}" if said else ""
