"""GGUF written and read again, against gguf-py doing the same with the same tensors.

Export: a Llama in bfloat16 memory becomes a file of one type; gguf-py gets tensors that are named
and permuted already, and streams them one by one. Both end when the file is durable. Import: every
tensor of such a file in bfloat16; ours is a model by then.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.generate import CACHE, TOY, Llama, written
from benchmarks.harness import Variant

if TYPE_CHECKING:
    from loadkit_gguf.header import GGUFHeader

__all__ = ["KINDS", "export_variants", "exported", "import_variants"]

Go = Callable[[], Any]

KINDS = ("F16", "Q8_0", "Q4_0")
PLAIN = "BF16"  # the checkpoint's own numbers under GGUF's names: what gguf-py starts from


def exported(model: Llama) -> dict[str, Path]:
    """A checkpoint as GGUF, by type; written in a process of its own where a file is missing."""
    files = {kind: CACHE / f"{model.name}-{kind}.gguf" for kind in (PLAIN, *KINDS)}
    if not all(path.is_file() for path in files.values()):
        command = [sys.executable, "-m", "benchmarks.gguf_export", str(written(model))]
        tests = str(Path(__file__).resolve().parent.parent)
        subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": tests})
    return files


def ours(folder: str, kind: str, to: str) -> Go:
    """``loadkit.save`` of a model that owns its memory."""
    model = _model(folder)
    _save(_model(str(written(TOY))), to, kind)
    Path(to).unlink()

    def go() -> dict[str, float]:
        _save(model, to, kind)
        return _size(to)

    return go


def gguf_py(plain: str, like: str, to: str) -> Go:
    """``GGUFWriter``, each tensor by ``gguf.quants.quantize`` in the type it has in ``like``."""
    import gguf

    with torch.no_grad():
        tensors = [(name, tensor.clone()) for name, tensor in _tensors(plain)]
    kinds = {t.name: gguf.GGMLQuantizationType(t.kind.number) for t in _header(like).tensors}
    Path(to).unlink(missing_ok=True)

    def go() -> dict[str, float]:
        writer: Any = gguf.GGUFWriter(to, "llama")
        for name, tensor in tensors:
            per, nbytes = gguf.GGML_QUANT_SIZES[kinds[name]]
            size = tensor.numel() // per * nbytes
            writer.add_tensor_info(name, tensor.shape, None, size, kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors:
            writer.write_tensor_data(gguf.quants.quantize(tensor.float().numpy(), kinds[name]))
        os.fsync(writer.fout[0].fileno())
        writer.close()
        return _size(to)

    return go


def decoded_by_gguf_py(path: str) -> Go:
    """``GGUFReader``, and ``gguf.quants.dequantize`` of every tensor."""
    import gguf

    def go() -> list[torch.Tensor]:
        found = []
        for tensor in gguf.GGUFReader(path).tensors:
            numbers: Any = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            own = numbers if numbers.flags.writeable else numbers.copy()  # float32 is a view
            found.append(torch.from_numpy(own).to(torch.bfloat16))
        return found

    return go


def export_variants(model: Llama, files: dict[str, Path]) -> list[Variant]:
    """Both writers of each type."""
    found = []
    for kind in KINDS:
        to = str(CACHE / f"export-{kind}.gguf")
        theirs = {"plain": str(files[PLAIN]), "like": str(files[kind]), "to": to}
        mine = {"folder": str(written(model)), "kind": kind, "to": to}
        found.append(Variant(f"gguf-py, {kind}", "gguf_export:gguf_py", theirs))
        found.append(Variant(f"loadkit, {kind}", "gguf_export:ours", mine))
    return found


def import_variants(files: dict[str, Path]) -> list[Variant]:
    """Both readers of each type."""
    found = []
    for kind in KINDS:
        at, own = {"path": str(files[kind])}, [files[kind]]
        theirs = "gguf_export:decoded_by_gguf_py"
        found.append(Variant(f"gguf-py, {kind}", theirs, at, files=own))
        found.append(Variant(f"loadkit, {kind}", "gguf_packed:loadkit", at, files=own))
    return found


def _model(folder: str) -> Any:
    import loadkit
    from loadkit.config import LoadConfig

    config = LoadConfig(alias="never", use_tqdm_on_load=False)
    return loadkit.load_model(folder, load_config=config)


def _save(model: Any, to: str, kind: str) -> None:
    import loadkit

    options = {"quantization": kind}
    loadkit.save(model, to, save_format="gguf", model_loader_extra_config=options)


def _size(path: str) -> dict[str, float]:
    return {"file_gib": Path(path).stat().st_size / (1 << 30)}


def _header(path: str) -> GGUFHeader:
    from loadkit.sources.local_file import LocalFile
    from loadkit_gguf.header import read_gguf_header

    file = LocalFile(Path(path).name, path)
    try:
        return read_gguf_header(file)
    finally:
        file.close()


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of a file of plain numbers."""
    size = Path(path).stat().st_size
    data = torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    for tensor in _header(path).tensors:
        raw = data[tensor.offset : tensor.offset + tensor.nbytes]
        yield tensor.name, raw.view(dtypes[tensor.kind.name]).view(tensor.shape)


def main() -> None:
    """Write every type of a checkpoint."""
    folder = Path(sys.argv[1])
    model = _model(str(folder))
    for kind in (PLAIN, *KINDS):
        _save(model, str(CACHE / f"{folder.name}-{kind}.gguf"), kind)


if __name__ == "__main__":
    main()
