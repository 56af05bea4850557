"""Which names a pickle may import, what they mean, and how any other is refused.

Nothing is imported: a name is looked up in the tables below, and that is all.
"""

from __future__ import annotations

from typing import NoReturn

from loadkit.file_checks import show
from loadkit.torch_archive.errors import refused
from loadkit.torch_archive.values import STORAGES, TORCH_DTYPES, Global

__all__ = ["REBUILDERS", "check_name", "storage_dtype"]

# torch._utils' functions that make a plain tensor of a storage.
REBUILDERS = frozenset(
    {
        "_rebuild_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
        "_rebuild_parameter",
        "_rebuild_parameter_with_state",
    }
)
_OTHERS = frozenset({("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device")})
_STORAGE_MODULES = ("torch", "torch.storage", "torch.cuda")
_RESAVE = "where the file is trusted: load it with torch and save a plain state dict of tensors"


def storage_dtype(found: Global) -> str | None:
    """The dtype of a storage class; None where the name is no such class."""
    return STORAGES.get(found.name) if found.module in _STORAGE_MODULES else None


def check_name(found: Global, file: str, *, whole: bool) -> None:
    """Let a name pass, or say why not.

    Args:
        found: the name.
        file: whose pickle it is in.
        whole: the pickle is one object of this class, and nothing around it.

    Raises:
        FormatError: E_UNSUPPORTED, a tensor of another kind; E_STRUCTURE, a pickled module or
            other object instead of a state dict; E_PICKLE, any other name.
    """
    module, name = found.module, found.name
    if module == "torch._utils" and name in REBUILDERS:
        return
    if (module, name) in _OTHERS or storage_dtype(found) is not None:
        return
    if module == "torch" and name in TORCH_DTYPES:
        return
    if module in ("torch._utils", "torch._tensor") and name.startswith("_rebuild"):
        _unsupported(found, file, f"a tensor of another kind ({name})")
    if module == "torch" and name.startswith("Q") and name.endswith("Storage"):
        _unsupported(found, file, f"a quantised tensor ({name})")
    if whole:
        raise refused(
            "E_STRUCTURE",
            file,
            f"an object of class {show(found)} is pickled whole, not a dict of tensors",
            "a model has to be saved by torch.save(model.state_dict(), ...)",
            offset=found.at,
            **{"global": str(found)},
        )
    raise refused(
        "E_PICKLE",
        file,
        f"the pickle names {show(found)}, which is no part of a dict of tensors; nothing was "
        "imported or run",
        _RESAVE,
        offset=found.at,
        **{"global": str(found), "opcode": "GLOBAL"},
    )


def _unsupported(found: Global, file: str, what: str) -> NoReturn:
    raise refused(
        "E_UNSUPPORTED",
        file,
        f"the pickle holds {what}; only plain tensors with strides are read",
        "load it with torch, make plain tensors of them (to_dense, dequantize) and save those",
        offset=found.at,
        **{"global": str(found)},
    )
