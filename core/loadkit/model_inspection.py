"""What a model class can do, asked without importing it here: a subprocess answers in JSON.

Some model modules touch an accelerator, or take seconds, when they are imported; a process that
only asks must not pay for that. Answers are kept on disk until the module, one of its bases, or
a version changes.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadkit.entry_index import core_version
from loadkit.errors import ArchitectureImportError
from loadkit.interfaces import capabilities
from loadkit.text import printable

__all__ = ["INSPECT_TIMEOUT", "ModelInfo", "inspect_class", "inspect_path"]

INSPECT_TIMEOUT = 120.0  # seconds until an import counts as hung
_MAX_ANSWER = 1 << 20  # bytes


@dataclass(frozen=True)
class ModelInfo:
    """What a model can do; see ``loadkit.interfaces`` for the words."""

    architecture: str
    has_inner_state: bool = False
    is_attention_free: bool = False
    is_hybrid: bool = False
    is_pooling_model: bool = False
    is_text_generation_model: bool = False
    supports_lora: bool = False
    supports_multimodal: bool = False
    supports_pp: bool = False
    supports_quant: bool = False
    supports_scoring: bool = False
    supports_transcription: bool = False
    packed_modules_mapping: dict[str, list[str]] = field(default_factory=dict)


def inspect_class(architecture: str, cls: type) -> ModelInfo:
    """What a class can do that this process has already."""
    return ModelInfo(architecture, **capabilities(cls))


def inspect_path(
    architecture: str, path: str, *, distribution: str = "", timeout: float = INSPECT_TIMEOUT
) -> ModelInfo:
    """What the class at ``module:Class`` can do, without importing it in this process.

    Args:
        architecture: its name.
        path: ``module:Class``.
        distribution: whose version the answer also depends on.
        timeout: seconds.

    Raises:
        ArchitectureImportError: E_INSPECT, the import failed, ended the process or hung.
    """
    key = _key(path, distribution)
    answer = _cached(key)
    if answer is None:
        answer = _ask(architecture, path, timeout)
        _keep(key, answer)
    return ModelInfo(architecture, **answer["capabilities"])


def _ask(architecture: str, path: str, timeout: float) -> dict[str, Any]:
    """The subprocess's answer: ``{"capabilities": ..., "files": {path: digest}}``."""
    request = json.dumps({"sys_path": sys.path, "path": path})
    command = [sys.executable, "-c", "from loadkit.model_inspection import _answer; _answer()"]
    folder = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": folder}

    def failed(problem: str) -> ArchitectureImportError:
        return ArchitectureImportError(
            f"architecture '{printable(architecture, 100)}' ({printable(path, 120)}) could not be "
            f"inspected: {problem}",
            code="E_INSPECT",
            detail={"architecture": architecture, "value": path, "cause": problem},
        )

    try:
        done = subprocess.run(
            command, input=request, capture_output=True, timeout=timeout, text=True,
            errors="replace", env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise failed(f"importing it took more than {timeout:g} seconds") from None
    except OSError as error:
        raise failed(f"no subprocess could be started: {error}") from error
    try:
        answer = json.loads(done.stdout[-_MAX_ANSWER:])
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise failed(
            f"the process that imported it ended with {done.returncode}: {printable(lines[-1])}"
        ) from None
    if "error" in answer:
        raise failed(printable(answer["error"], 500))
    found: dict[str, Any] = answer
    return found


def _answer() -> None:
    """The subprocess: import the class, answer on the real stdout, whatever the module prints."""
    import faulthandler

    from loadkit.plugin_guard import import_value

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a module prints goes to stderr
    faulthandler.enable()
    request = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    try:
        cls = import_value(request["path"])
        if not isinstance(cls, type):
            raise TypeError(f"{request['path']} is no class")
        answer: dict[str, Any] = {"capabilities": capabilities(cls), "files": _files(cls)}
    except BaseException as error:  # noqa: BLE001 - the answer says it
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, out)
    out.flush()
    os._exit(0)  # threads and exit handlers of the module do not matter


def _files(cls: type) -> dict[str, str]:
    """The source files of a class and its bases, with digests."""
    modules = {base.__module__ for base in cls.__mro__} - {"builtins"}
    paths = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    return {path: _digest(path) for path in sorted(filter(None, paths))}


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return ""


def _key(path: str, distribution: str) -> str:
    """What an answer depends on besides the content of files."""
    versions = [sys.version, core_version() or ""]
    for name in ("torch", distribution):
        try:
            versions.append(importlib.metadata.version(name) if name else "")
        except importlib.metadata.PackageNotFoundError:
            versions.append("")
    text = json.dumps([path, distribution, versions, sys.path])
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _folder() -> Path | None:
    """Where answers are kept, or None where there is no such place."""
    given = os.environ.get("LOADKIT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    try:
        base = Path(given) if given else Path.home() / ".cache"
    except RuntimeError:
        return None
    return base / "loadkit" / "inspect"


def _cached(key: str) -> dict[str, Any] | None:
    """A kept answer whose files are all as they were."""
    folder = _folder()
    if folder is None:
        return None
    try:
        answer = json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))
        files = answer["files"].items()
        ModelInfo("", **answer["capabilities"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    fresh = bool(files) and all(digest and _digest(path) == digest for path, digest in files)
    return {"capabilities": answer["capabilities"], "files": dict(files)} if fresh else None


def _keep(key: str, answer: dict[str, Any]) -> None:
    """Keep an answer; where that cannot be, the next process asks again."""
    folder = _folder()
    if folder is None:
        return
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            json.dump(answer, file)
        Path(file.name).replace(folder / f"{key}.json")
