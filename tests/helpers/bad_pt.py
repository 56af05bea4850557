"""Archives of ``torch.save`` that lie, written byte by byte: what each has to come to.

A row is an id of the list of hostile inputs, the codes that are right ("" is: it loads), and the
file's bytes. Nothing here is ever unpickled.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

__all__ = ["ROWS", "Pickle", "Row", "archive", "legacy", "one_tensor", "saved"]

MARKER = "loadkit-was-run"  # the file that a pickle would make, if it were run
FLOATS = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)


class Pickle:
    """Bytes of a pickle of protocol 2, opcode after opcode."""

    def __init__(self, protocol: int = 2) -> None:
        self.data = b"\x80" + bytes([protocol])

    def raw(self, *opcodes: bytes) -> Pickle:
        self.data += b"".join(opcodes)
        return self

    def text(self, value: str) -> Pickle:
        encoded = value.encode("utf-8", "surrogatepass")
        return self.raw(b"X", struct.pack("<I", len(encoded)), encoded)

    def number(self, value: int) -> Pickle:
        if -(2**31) <= value < 2**31:
            return self.raw(b"J", struct.pack("<i", value))
        size = value.bit_length() // 8 + 1
        return self.raw(b"\x8a", bytes([size]), value.to_bytes(size, "little", signed=True))

    def tuple(self, values: tuple[int, ...]) -> Pickle:
        self.raw(b"(")
        for value in values:
            self.number(value)
        return self.raw(b"t")

    def name(self, module: str, name: str) -> Pickle:
        return self.raw(f"c{module}\n{name}\n".encode())

    def storage(
        self,
        *,
        kind: str = "FloatStorage",
        key: str = "0",
        numel: int = 4,
        location: str = "cpu",
        old: bool = False,
    ) -> Pickle:
        self.raw(b"(").text("storage").name("torch", kind).text(key).text(location).number(numel)
        return self.raw(b"NtQ" if old else b"tQ")

    def tensor(
        self,
        *,
        size: tuple[int, ...] = (4,),
        stride: tuple[int, ...] = (1,),
        offset: int = 0,
        **storage: Any,
    ) -> Pickle:
        self.name("torch._utils", "_rebuild_tensor_v2").raw(b"(").storage(**storage)
        self.number(offset).tuple(size).tuple(stride)
        return self.raw(b"\x89").name("collections", "OrderedDict").raw(b")RtR")

    def stop(self) -> bytes:
        return self.data + b"."


def one_tensor(**tensor: Any) -> bytes:
    """The pickle of ``{"w": a tensor}``."""
    return Pickle().raw(b"}").text("w").tensor(**tensor).raw(b"s").stop()


def archive(
    pickle: bytes,
    records: dict[str, bytes] | None = None,
    *,
    compress: tuple[str, ...] = (),
    root: str = "archive",
) -> bytes:
    """A zip archive as ``torch.save`` lays it out."""
    buffer = io.BytesIO()
    contents = {"data.pkl": pickle, **({"data/0": FLOATS} if records is None else records)}
    with zipfile.ZipFile(buffer, "w", allowZip64=True) as out:
        for name, data in contents.items():
            kind = zipfile.ZIP_DEFLATED if name in compress else zipfile.ZIP_STORED
            out.writestr(f"{root}/{name}", data, kind)
    return buffer.getvalue()


def saved(value: Any, **options: Any) -> bytes:
    """What ``torch.save`` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def legacy(
    pickle: bytes | None = None,
    keys: tuple[str, ...] = ("0",),
    storages: tuple[tuple[int, bytes], ...] = ((4, FLOATS),),
    *,
    little: bool = True,
    tail: bytes = b"",
) -> bytes:
    """A file of before torch 1.6."""
    magic = Pickle().raw(b"\x8a\x0a", bytes.fromhex("6cfc9c46f9206aa85019")).stop()
    facts = Pickle().raw(b"}").text("little_endian").raw(b"\x88" if little else b"\x89", b"s")
    listed = Pickle().raw(b"](")
    for key in keys:
        listed.text(key)
    out = magic + Pickle().number(1001).stop() + facts.stop()
    out += one_tensor(old=True) if pickle is None else pickle
    out += listed.raw(b"e").stop()
    for count, data in storages:
        out += struct.pack("<Q", count & (2**64 - 1)) + data
    return out + tail


class Row(NamedTuple):
    """``codes``: any of these is right; none: it loads."""

    codes: tuple[str, ...]
    data: Callable[[], bytes]


def _row(codes: str, data: Callable[[], bytes]) -> Row:
    return Row(tuple(codes.split()), data)


def _zip(codes: str, pickle: Callable[[], bytes], **options: Any) -> Row:
    return _row(codes, lambda: archive(pickle(), **options))


def _tensor(codes: str, **tensor: Any) -> Row:
    return _zip(codes, lambda: one_tensor(**tensor))


def _value(codes: str, *opcodes: bytes, name: tuple[str, str] | None = None) -> Row:
    """``{"w": ...}`` of some opcodes."""

    def made() -> bytes:
        pickle = Pickle().raw(b"}").text("w")
        if name is not None:
            pickle.name(*name)
        return pickle.raw(*opcodes, b"s").stop()

    return _zip(codes, made)


def _evil() -> Pickle:
    command = Pickle().name("posix", "system").raw(b"(").text(f"touch {MARKER}")
    return command.raw(b"tR")


def _changed(**patch: Any) -> Callable[[], bytes]:
    """A good archive with bytes of its headers replaced.

    Args:
        patch: ``local_<field>``, ``central_<field>`` (of the record ``data/0``), ``end_<field>``.
    """
    fields = {
        "local": ("<4sHHHHHIIIHH", ["magic", "need", "flags", "method", "time", "date", "crc",
                                    "packed", "size", "names", "extras"]),
        "central": ("<4sHHHHHHIIIHHHHHII", ["magic", "made", "need", "flags", "method", "time",
                                            "date", "crc", "packed", "size", "names", "extras",
                                            "comment", "disk", "inner", "outer", "header"]),
        "end": ("<4sHHHHIIH", ["magic", "disk", "first", "here", "count", "size", "start",
                               "comment"]),
    }  # fmt: skip

    def made() -> bytes:
        data = bytearray(archive(one_tensor()))
        end = data.rfind(b"PK\x05\x06")
        places = {
            "end": end,
            "central": data.find(b"archive/data/0", data.find(b"PK\x01\x02")) - 46,
            "local": data.find(b"archive/data/0") - 30,
        }
        for key, value in patch.items():
            part, _, name = key.partition("_")
            layout, names = fields[part]
            values = list(struct.unpack_from(layout, data, places[part]))
            values[names.index(name)] = value
            struct.pack_into(layout, data, places[part], *values)
        return bytes(data)

    return made


def _overlap() -> bytes:
    """Two records of the directory with one and the same local header."""
    data = bytearray(archive(one_tensor(), {"data/0": FLOATS, "data/1": FLOATS}))
    second = data.find(b"archive/data/1", data.find(b"PK\x01\x02")) - 46
    first = data.find(b"archive/data/0") - 30
    struct.pack_into("<I", data, second + 42, first)
    return bytes(data)


def _swallowed() -> bytes:
    """A record whose data reaches over the next one, header and all; both headers of it agree."""
    data = bytearray(archive(one_tensor(), {"data/0": FLOATS, "data/1": FLOATS}))
    size = data.find(b"PK\x01\x02") - data.find(FLOATS)
    entry = data.find(b"archive/data/0", data.find(b"PK\x01\x02")) - 46
    struct.pack_into("<II", data, entry + 20, size, size)
    struct.pack_into("<II", data, data.find(b"archive/data/0") - 30 + 18, size, size)
    return bytes(data)


def _renamed() -> bytes:
    data = bytearray(archive(one_tensor()))
    at = data.find(b"archive/data/0")
    data[at : at + 14] = b"archive/data/9"
    return bytes(data)


def _twice() -> bytes:
    buffer = io.BytesIO(archive(one_tensor(key="1"), {"data/0": FLOATS, "data.pkx": one_tensor()}))
    return buffer.getvalue().replace(b"data.pkx", b"data.pkl")


def _zip64_lie() -> bytes:
    """A record whose real sizes are in a zip64 field, and are larger than the file."""
    data = bytearray(_changed(central_size=0xFFFFFFFF, central_packed=0xFFFFFFFF)())
    entry = data.find(b"archive/data/0", data.find(b"PK\x01\x02")) - 46
    struct.pack_into("<H", data, entry + 30, 20)
    field = struct.pack("<HHQQ", 1, 16, 1 << 40, 1 << 40)
    at = entry + 46 + len("archive/data/0")
    data[at:at] = field
    end = data.rfind(b"PK\x05\x06")
    size, _ = struct.unpack_from("<II", data, end + 12)
    struct.pack_into("<I", data, end + 12, size + len(field))
    return bytes(data)


def _big_endian() -> bytes:
    numbers = struct.pack(">4f", 1.0, 2.0, 3.0, 4.0)
    return archive(one_tensor(), {"byteorder": b"big", "data/0": numbers})


def _flipped() -> bytes:
    data = bytearray(archive(one_tensor()))
    data[data.find(FLOATS) + 1] ^= 1
    return bytes(data)


def _deep(opcode: bytes, count: int, start: bytes = b")") -> Callable[[], bytes]:
    return lambda: Pickle().raw(b"}").text("w").raw(start, opcode * count, b"s").stop()


def _shared() -> bytes:
    pickle = Pickle().raw(b"}").text("a").tensor().raw(b"s").text("b").tensor().raw(b"s").stop()
    return archive(pickle)


def _many_storages() -> bytes:
    keys = tuple(str(number) for number in range(50_000))
    return legacy(None, keys, ())


def _script() -> bytes:
    return archive(one_tensor(), {"constants.pkl": b"\x80\x02).", "code/__torch__.py": b"x = 1"})


_SPARSE = ("torch._utils", "_rebuild_sparse_tensor")
_ABOVE = (2**48, 2**63 - 1, 2**64)

ROWS: dict[str, Row] = {
    "good": _tensor(""),
    "good-legacy": _row("", legacy),
    "P01": _row("E_PICKLE", bytes),
    "P02-noise": _row("E_PICKLE E_FORMAT", lambda: bytes(range(200, 256)) * 8),
    "P03": _row("E_PICKLE", lambda: archive(one_tensor())[:200]),
    "P04": _row("E_PICKLE", lambda: _evil().stop()),
    "P04-text": _row("E_PICKLE", lambda: f"cposix\nsystem\n(S'touch {MARKER}'\ntR.".encode()),
    "P04-protocol-4": _row(
        "E_PICKLE", lambda: b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93."
    ),
    "P05": _zip(
        "E_PICKLE", lambda: Pickle().raw(b"}").text("w").raw(_evil().data[2:], b"s").stop()
    ),
    "P05-top": _zip("E_PICKLE", lambda: _evil().stop()),
    "P06-builtins": _value("E_PICKLE", b"X\x01\0\0\x001\x85R", name=("builtins", "eval")),
    "P07": _row("E_LAYOUT", lambda: archive(one_tensor(), {})),
    "P08": _tensor("E_LAYOUT", numel=2**40),
    "P09": _tensor("E_LAYOUT", numel=64, size=(64,)),
    "P10-numel-small": _tensor("E_LAYOUT", numel=2, size=(2,)),
    "P11": _tensor("E_LAYOUT", size=(5,)),
    "P11-stride": _tensor("E_LAYOUT", size=(2, 2), stride=(3, 1)),
    "P12": _tensor("E_LAYOUT", offset=-4),
    "P13": _tensor("E_LAYOUT", stride=(-1,)),
    "P14-dims": _tensor("E_LAYOUT", size=(1,) * 9, stride=(1,) * 9),
    "P14-strides": _tensor("E_LAYOUT", size=(4,), stride=(1, 1)),
    "P15": _tensor("E_LAYOUT", size=(2**62, 4), stride=(4, 1)),
    "P15-empty": _tensor("E_LAYOUT", size=(0, 2**62), stride=(4, 1)),
    "P15-numel-minus": _tensor("E_LAYOUT", numel=-4),
    "P16": _value(
        "E_PICKLE", Pickle().number(10**9).data[2:], b"\x85R", name=("__builtin__", "bytearray")
    ),
    "P17": _value(
        "E_PICKLE", Pickle().number(10**11).data[2:], b"\x85R", name=("__builtin__", "bytearray")
    ),
    "P19": _value("E_PICKLE", b"M\0\x04\x85R", name=("torch", "Tensor")),
    "P20": _value("E_PICKLE", b")R", name=("collections", "Counter")),
    "P21-set": _value("E_PICKLE", b"]\x85R", name=("__builtin__", "set")),
    "P21-complex": _value("E_PICKLE", b"K\x01K\x02\x86R", name=("__builtin__", "complex")),
    "P21-encode": _value(
        "E_PICKLE", b"X\x01\0\0\0aX\x06\0\0\0latin1\x86R", name=("_codecs", "encode")
    ),
    "P22-dtype-called": _value("E_PICKLE", b")R", name=("torch", "float32")),
    "P23": _zip(
        "E_PICKLE", lambda: Pickle().raw(b"}", b")", b"\x85" * 200_000, b"K\x01s").stop()
    ),
    "P24": _zip("E_PICKLE", _deep(b"\x85", 2_000_000)),
    "P25": _zip("E_PICKLE", _deep(b"](", 1_000_000, b"")),
    "P25-not-marked": _zip("E_PICKLE", _deep(b"]", 1_000_000, b"")),
    "P26-dicts": _zip("E_PICKLE", _deep(b"}", 1_000_000, b"")),
    "P26-twice-as-wide": _zip("E_PICKLE", _deep(b"q\0h\0\x86", 100)),
    "P27": _row(
        "E_ZIP", lambda: archive(one_tensor(), {"data/0": bytes(1 << 24)}, compress=("data/0",))
    ),
    "P28": _row(
        "E_ZIP",
        lambda: archive(one_tensor() + bytes(1 << 24), compress=("data.pkl",)),
    ),
    "P29": _row("E_ZIP", _overlap),
    "P29-swallowed": _row("E_ZIP", _swallowed),
    "P30-local-size": _row("E_ZIP", _changed(local_size=15, local_packed=15)),
    "P30-local-crc": _row("E_ZIP", _changed(local_crc=1)),
    "P31": _row("E_ZIP", _zip64_lie),
    "P31-missing": _row("E_ZIP", _changed(central_size=0xFFFFFFFF)),
    "P32": _row("E_ZIP", _changed(end_start=1 << 30)),
    "P32-count": _row("E_ZIP", _changed(end_count=9, end_here=9)),
    "P32-million": _row("E_ZIP", _changed(end_count=65_534, end_here=65_534)),
    "P33": _row("E_ZIP", _changed(central_header=1 << 30)),
    "P34-no-header-there": _row("E_ZIP", _changed(central_header=3)),
    "P35": _row("E_ZIP", _renamed),
    "P36": _row("E_ZIP", _changed(central_flags=1, local_flags=1)),
    "P36-central": _row("E_ZIP", _changed(central_flags=1)),
    "P37": _row("E_ZIP", _twice),
    "P38-bytes-before": _row("E_ZIP", lambda: b"PK\x03\x04" + archive(one_tensor())),
    "P38-bytes-after": _row("E_ZIP", lambda: archive(one_tensor()) + b"more"),
    "P39": _row(
        "E_ZIP", lambda: struct.pack("<Q", 2) + b"{}" + archive(one_tensor())
    ),
    "P40": _zip("E_PICKLE", lambda: Pickle().raw(b"}X\xff\xff\xff\xffabc").stop()),
    "P40-legacy": _row("E_PICKLE", lambda: Pickle().raw(b"X\xff\xff\xff\xffabc").stop()),
    "P41": _zip("E_PICKLE", lambda: Pickle().raw(b"}h\x07").stop()),
    "P42-stack": _zip("E_PICKLE", lambda: Pickle().raw(b"s").stop()),
    "P42-mark": _zip("E_PICKLE", lambda: Pickle().raw(b"}u").stop()),
    "P42-opcode": _zip("E_PICKLE", lambda: Pickle().raw(b"}\xff").stop()),
    "P42-utf8": _zip("E_PICKLE", lambda: Pickle().raw(b"}X\x01\0\0\0\xffNs").stop()),
    "P43": _zip("E_PICKLE", lambda: one_tensor()[:-1]),
    "P44": _zip("E_PICKLE", lambda: one_tensor() + b"\x80\x02N."),
    "P45-4": _zip("E_PICKLE", lambda: Pickle(4).raw(b"}").stop()),
    "P45-5": _zip("E_PICKLE", lambda: Pickle(5).raw(b"}").stop()),
    "P46-object": _value("E_PICKLE", b")\x81", name=("collections", "OrderedDict")),
    "P47-int": _zip("E_STRUCTURE", lambda: Pickle().raw(b"K\x07").stop()),
    "P47-list": _zip("E_STRUCTURE", lambda: Pickle().raw(b"]").stop()),
    "P47-tensor": _zip("E_STRUCTURE", lambda: Pickle().tensor().stop()),
    "P47-module": _row("E_STRUCTURE", lambda: saved(torch.nn.Linear(2, 2))),
    "P47-numbers": _zip("E_STRUCTURE", lambda: Pickle().raw(b"}").text("a").raw(b"K\x01s").stop()),
    "P48": _zip("E_STRUCTURE", lambda: Pickle().raw(b"}K\x01").tensor().raw(b"s").stop()),
    "P48-tuple": _zip("E_STRUCTURE", lambda: Pickle().raw(b"})").tensor().raw(b"s").stop()),
    "P49": _zip(
        "E_STRUCTURE",
        lambda: Pickle().raw(b"}(").text("w").tensor().text("w").tensor().raw(b"u").stop(),
    ),
    "P50-name-long": _zip(
        "E_NAME", lambda: Pickle().raw(b"}").text("a" * 1025).tensor().raw(b"s").stop()
    ),
    "P50-name-escape": _zip(
        "E_NAME", lambda: Pickle().raw(b"}").text("\x1b[2J").tensor().raw(b"s").stop()
    ),
    "P50-name-empty": _zip("E_NAME", lambda: Pickle().raw(b"}").text("").tensor().raw(b"s").stop()),
    "P51": _zip(
        "E_PICKLE",
        lambda: Pickle().raw(b"}").text("w").name("torch._utils", "_rebuild_tensor_v2").raw(b"((")
        .text("storage").text("FloatStorage").text("0").text("cpu").raw(b"K\x04tQ").stop(),
    ),
    "P52": _tensor("E_LAYOUT", key="../../etc/passwd"),
    "P53": _tensor("", location="cuda:99"),
    "P55": _row("", _big_endian),
    "P55-nonsense": _row(
        "E_LAYOUT", lambda: archive(one_tensor(), {"byteorder": b"middle", "data/0": FLOATS})
    ),
    "P56-coo": _row("E_UNSUPPORTED", lambda: saved({"w": torch.eye(2).to_sparse()})),
    "P56-csr": _value("E_UNSUPPORTED", b")R", name=_SPARSE),
    "P56-quantised": _value("E_UNSUPPORTED", b")R", name=("torch._utils", "_rebuild_qtensor")),
    "P56-quantised-storage": _tensor("E_UNSUPPORTED", kind="QInt8Storage"),
    "P56-nested": _value("E_UNSUPPORTED", b")R", name=("torch._utils", "_rebuild_nested_tensor")),
    "P56-wrapper": _value(
        "E_UNSUPPORTED", b")R", name=("torch._utils", "_rebuild_wrapper_subclass")
    ),
    "P56-meta": _row("E_UNSUPPORTED", lambda: saved({"w": torch.empty(2, device="meta")})),
    "P56-meta-location": _tensor("E_UNSUPPORTED", location="meta"),
    "P56-conjugate": _row(
        "E_UNSUPPORTED", lambda: saved({"w": torch.ones(2, dtype=torch.complex64).conj()})
    ),
    "P57-2^28": _row("E_LAYOUT", lambda: legacy(one_tensor(numel=2**28, old=True))),
    "P57-2^40": _row("E_LAYOUT", lambda: legacy(one_tensor(numel=2**40, old=True))),
    "P57-counted-2^40": _row(
        "E_LAYOUT", lambda: legacy(one_tensor(numel=2**40, old=True), storages=((2**40, FLOATS),))
    ),
    "P57-short": _row("E_LAYOUT", lambda: legacy()[:-1]),
    "P57-missing": _row("E_LAYOUT", lambda: legacy(storages=())),
    "P57-many": _row("E_LAYOUT", _many_storages),
    "P57-no-key": _row("E_LAYOUT", lambda: legacy(keys=())),
    "P57-key-twice": _row("E_LAYOUT", lambda: legacy(keys=("0", "0"))),
    "P57-trailing": _row("E_LAYOUT", lambda: legacy(tail=b"more")),
    "P57-count-minus": _row("E_LAYOUT", lambda: legacy(storages=((-1, FLOATS),))),
    "P57-big-endian": _row(
        "", lambda: legacy(storages=((4, struct.pack(">4f", 1, 2, 3, 4)),), little=False)
    ),
    "P57-facts": _row(
        "E_PICKLE",
        lambda: Pickle().raw(b"\x8a\x0a", bytes.fromhex("6cfc9c46f9206aa85019")).stop()
        + Pickle().number(1001).stop()
        + Pickle().raw(b"}").stop(),
    ),
    "P58-tar": _row("E_UNSUPPORTED", lambda: b"sys_info".ljust(257, b"\0") + b"ustar\x0000" * 40),
    "P59": _row("E_UNSUPPORTED", _script),
    "P60": _row(
        "E_UNSUPPORTED", lambda: archive(b"", {"archive_format": b"pt2", "models/m.json": b"{}"})
    ),
    "P61": _row("", _flipped),  # E_CRC where integrity is on
    "P62-no-pickle": _row(
        "E_ZIP", lambda: archive(b"").replace(b"data.pkl", b"data.txt")
    ),
    "P63": _row("", _shared),
    "LFS": _row("E_FORMAT", lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    "page": _row("E_FORMAT", lambda: b"<!DOCTYPE html><html>401</html>"),
    "safetensors": _row("E_FORMAT", lambda: struct.pack("<Q", 2) + b"{}"),
}  # fmt: skip
