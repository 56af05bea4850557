"""Every quantised matrix of a checkpoint, found by names and checked against headers.

A 4-bit weight ``x.weight`` comes with ``x.weight.absmax`` (scales of blocks), ``.quant_map`` (what
the codes stand for), ``.quant_state.bitsandbytes__KIND`` (JSON), and with double quantisation
``.nested_absmax`` and ``.nested_quant_map``. An int8 one comes with ``x.SCB`` (scales of rows), and
often ``x.weight_format``. Beside headers only the JSON and the codes (64 bytes) are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch

from loadkit.errors import FormatError
from loadkit.file_checks import show
from loadkit.tensor_info import TensorInfo
from loadkit.tracing.lazy_tensor import LazyTensor, Offered
from loadkit.tracing.reading import read_now
from loadkit.tracing.storage import FileLeaf
from loadkit_bitsandbytes.quant_state import QuantState, parse_quant_state, quant_error
from loadkit_bitsandbytes.scheme import CODES

__all__ = ["Offer", "StoredMatrix", "Survey", "info_of", "survey"]

Offer = torch.Tensor | Offered

_STATE = ".quant_state.bitsandbytes__"
_ROLES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STORAGE = ("uint8", "float16", "bfloat16", "float32")  # quant_storage: whatever, it is bytes
_SAME_CODE = 1e-4  # between the codes of versions of the library: 0.0052 and 0.00520833


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A quantised matrix of a checkpoint.

    Attributes:
        name: of its weight.
        shape: [N, K], in elements.
        state: how it is quantised to 4 bits; None: it is int8 with a scale for each row.
    """

    name: str
    shape: tuple[int, int]
    state: QuantState | None = None


@dataclass(frozen=True)
class Survey:
    """What was found.

    Attributes:
        matrices: by the name of the weight.
        roles: tensor -> (matrix, what it is of it): "weight", "absmax", "quant_map",
            "nested_absmax", "nested_quant_map", "state"; of int8 "SCB" and "weight_format".
    """

    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)
    roles: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def survey(offers: Iterable[tuple[str, Offer]]) -> Survey:
    """Find and check the quantised matrices among a checkpoint's tensors.

    Raises:
        FormatError: E_QUANT, a part is missing, or is not what the others say; names the tensor.
    """
    known = dict(offers)
    matrices: dict[str, StoredMatrix] = {}
    roles: dict[str, tuple[str, str]] = {}
    for name in known:
        base, mark, kind = name.partition(_STATE)
        if mark and base in matrices:
            raise _bad(known, name, f"{show(base)} has a second quant_state")
        if mark:
            matrices[base] = matrix = _four_bit(known, base, name, kind)
            roles[name] = base, "state"
            roles[base] = base, "weight"
            nested = matrix.state is not None and bool(matrix.state.scheme.nested)
            roles |= {f"{base}.{role}": (base, role) for role in _ROLES[: 4 if nested else 2]}
        elif name.endswith(".SCB") and _dtype(known.get(weight := _sibling(name))) == torch.int8:
            matrices[weight] = _eight_bit(known, weight, name)
            roles[weight], roles[name] = (weight, "weight"), (weight, "SCB")
            form = f"{weight}_format"
            if form in known:
                _check_format(known, form)
                roles[form] = weight, "weight_format"
    for name, offer in known.items():
        if name not in roles:
            _check_orphan(known, name, offer)
    return Survey(matrices, roles)


def info_of(offer: Offer) -> TensorInfo | None:
    """The header entry behind a tensor, if it is a file's, whole and as it is."""
    if isinstance(offer, Offered):
        return offer.info
    if isinstance(offer, LazyTensor) and not offer.lazy_storage.writes:
        leaf = offer.lazy_storage.base
        return leaf.info if isinstance(leaf, FileLeaf) else None
    return None


def _four_bit(known: Mapping[str, Offer], base: str, state_name: str, kind: str) -> StoredMatrix:
    info = info_of(known[state_name])
    state = parse_quant_state(
        _bytes(known[state_name]),
        tensor=state_name,
        kind=kind,
        file=None if info is None else info.file.name,
        offset=None if info is None else info.offset,
    )
    scheme, (N, K) = state.scheme, state.shape
    blocks = scheme.blocks(N * K)
    if base not in known:
        raise _bad(known, state_name, f"it describes {show(base)}, which is not there")
    weight = known[base]
    nbytes = math.prod(weight.shape) * weight.dtype.itemsize
    if _name_of(weight.dtype) not in _STORAGE or nbytes != (N * K + 1) // 2:
        raise _bad(
            known,
            base,
            f"it has {nbytes} bytes of {_name_of(weight.dtype)}; its quant_state says "
            f"[{N}, {K}] in 4 bits, which is {(N * K + 1) // 2} bytes",
        )
    scales = torch.uint8 if scheme.nested else torch.float32
    _check_part(known, base, "absmax", scales, blocks)
    _check_part(known, base, "quant_map", torch.float32, 16)
    if scheme.nested:
        entries = -(-blocks // scheme.nested)
        _check_part(known, base, "nested_absmax", torch.float32, entries)
        _check_part(known, base, "nested_quant_map", torch.float32, 256)
    elif f"{base}.nested_absmax" in known:
        raise _bad(known, f"{base}.nested_absmax", "its quant_state says nothing of nesting")
    if _has_own_code(known, f"{base}.quant_map", kind):
        state = state._replace(scheme=replace(scheme, own_code=True))
    return StoredMatrix(base, (N, K), state)


def _check_part(
    known: Mapping[str, Offer], base: str, role: str, dtype: torch.dtype, count: int
) -> None:
    """A part is there, and has so many elements of that dtype."""
    name = f"{base}.{role}"
    if name not in known:
        raise _bad(known, base, f"its {role} ({show(name)}) is missing")
    part = known[name]
    found = math.prod(part.shape)
    if part.dtype != dtype or found != count:
        raise _bad(
            known,
            name,
            f"it has {found} elements of {_name_of(part.dtype)}; the quant_state of {show(base)} "
            f"makes {count} of {_name_of(dtype)}",
        )


def _has_own_code(known: Mapping[str, Offer], name: str, kind: str) -> bool:
    """Whether a code is another than the library's.

    Raises:
        FormatError: E_QUANT, it holds what is no number.
    """
    found = struct.unpack("<16f", _bytes(known[name]))
    if not all(map(math.isfinite, found)):
        raise _bad(known, name, "it holds what is no finite number")
    return any(abs(a - b) > _SAME_CODE for a, b in zip(found, CODES[kind], strict=True))


def _eight_bit(known: Mapping[str, Offer], weight: str, scales: str) -> StoredMatrix:
    shape = tuple(known[weight].shape)
    if len(shape) != 2:
        raise _bad(known, weight, f"it is {list(shape)}, and no matrix")
    found = known[scales]
    if found.dtype != torch.float32 or tuple(found.shape) != shape[:1]:
        raise _bad(
            known,
            scales,
            f"it is {list(found.shape)} of {_name_of(found.dtype)}; {show(weight)} has {shape[0]} "
            "rows, and needs that many of float32",
        )
    return StoredMatrix(weight, (shape[0], shape[1]))


def _check_format(known: Mapping[str, Offer], name: str) -> None:
    """Rows one after another are the only order that versions of today have."""
    found = known[name]
    one = math.prod(found.shape) == 1 and found.dtype == torch.uint8
    value = _bytes(found)[0] if one else None
    if value != 0:
        said = "it is no single number" if value is None else f"it is {value}"
        raise _bad(
            known,
            name,
            f"{said}; accepted: 0, rows one after another",
            hint="save the checkpoint again with bitsandbytes 0.45 or newer",
        )


def _check_orphan(known: Mapping[str, Offer], name: str, offer: Offer) -> None:
    """Refuse parts of a matrix whose other parts are not there."""
    base, _, role = name.rpartition(".")
    if role in _ROLES and base in known:
        raise _bad(known, name, f"the quant_state of {show(base)} is missing")
    if role == "weight" and offer.dtype == torch.int8 and len(offer.shape) == 2:
        raise _bad(known, name, f"it is int8, and its scales ({show(base + '.SCB')}) are missing")
    packed = offer.dtype == torch.uint8 and len(offer.shape) == 2 and offer.shape[1] == 1
    if role == "weight" and packed:
        raise _bad(known, name, "it is packed, and its quant_state is missing")
    if role == "SCB":
        raise _bad(known, name, f"{show(_sibling(name))} is missing, or not int8")


def _sibling(name: str) -> str:
    return f"{name.rpartition('.')[0]}.weight"


def _dtype(offer: Offer | None) -> torch.dtype | None:
    return None if offer is None else offer.dtype


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(offer: Offer) -> bytes:
    """A small tensor's bytes, read now."""
    info = info_of(offer)
    if info is not None:
        return info.file.read(info.offset, info.nbytes)
    tensor = offer.tensor() if isinstance(offer, Offered) else offer
    if isinstance(tensor, LazyTensor):
        tensor = read_now(tensor.lazy_value(), None)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy())


def _bad(
    known: Mapping[str, Offer], name: str, problem: str, *, hint: str | None = None
) -> FormatError:
    offer = known.get(name)
    info = None if offer is None else info_of(offer)
    return quant_error(
        name,
        problem,
        file=None if info is None else info.file.name,
        offset=None if info is None else info.offset,
        hint=hint,
    )
