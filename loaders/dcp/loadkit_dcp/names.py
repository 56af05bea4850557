"""Which names a ``.metadata`` may import, and what they stand for. Nothing is imported.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``.
"""

from __future__ import annotations

from loadkit.file_checks import show
from loadkit.torch_archive.errors import refused
from loadkit.torch_archive.values import TORCH_DTYPES, Global

__all__ = ["CLASSES", "ENUMS", "PATHS", "check_name"]

_CHECKPOINT = "torch.distributed.checkpoint"
# Classes without arguments, whose attributes follow.
CLASSES = frozenset(
    {
        (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
        (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
        (f"{_CHECKPOINT}.metadata", "Metadata"),
        (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
        (f"{_CHECKPOINT}.metadata", "StorageMeta"),
        (f"{_CHECKPOINT}.metadata", "TensorProperties"),
        (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
        (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),  # before 2.3
    }
)
ENUMS = frozenset(
    {
        (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    }
)
PATHS = frozenset(
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
)
# Dtypes that are told apart from other names, so that an optimizer may have them; none is read.
_OTHER_DTYPES = frozenset(
    {"complex32", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"}
    | {f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)}
)
_OTHERS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)


def check_name(found: Global, file: str) -> None:
    """Let a name pass, or say why not.

    Raises:
        FormatError: E_PICKLE, it is none of a checkpoint's metadata.
    """
    pair = (found.module, found.name)
    if pair in CLASSES or pair in ENUMS or pair in PATHS or pair in _OTHERS:
        return
    if found.module == "torch" and (found.name in TORCH_DTYPES or found.name in _OTHER_DTYPES):
        return
    raise refused(
        "E_PICKLE",
        file,
        f"the pickle names {show(found)}, which is no part of a checkpoint's metadata; nothing was "
        "imported or run",
        "where the file is trusted: load it in the program that wrote it, and save it again with "
        "torch.distributed.checkpoint.save and the default planner",
        offset=found.at,
        **{"global": str(found), "opcode": "GLOBAL"},
    )
