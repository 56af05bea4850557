"""Every error loadkit raises, as one tree.

LoadkitError
├── UsageError                 exit 2   the caller asked for something that cannot be
│   ├── OptionError            E_OPTION      an option's name, type or value
│   ├── UnknownNameError       E_UNKNOWN     no such load format, reader, source, method ...
│   ├── NotInstalledError      E_NOT_INSTALLED   a known name whose distribution is missing
│   └── ConflictError          E_CONFLICT    two distributions claim one name
├── CheckpointError            exit 1   the files are at fault
│   ├── FormatError            E_HEADER E_UTF8 E_JSON E_LAYOUT E_DUPLICATE E_FIELD E_SHAPE E_DTYPE
│   │                          E_METADATA E_NAME E_FORMAT ...  (the code says which rule was broken)
│   ├── IndexFileError         E_INDEX       the weight index does not describe the files
│   ├── ConfigFileError        E_CONFIG      config.json
│   ├── PathError              E_PATH        a link, a device, a path out of the folder
│   ├── ManifestError          E_MANIFEST    loadkit_manifest.json
│   ├── IntegrityError         E_DIGEST E_SIZE   a file does not hold what somebody says it does
│   ├── ShardedError           E_SHARDED     rank files: missing, of another world, not one whole
│   └── NoWeightsError         E_NO_WEIGHTS  nothing there that any load format reads
├── ModelError                 exit 1   the model and the checkpoint do not fit
│   ├── ArchitectureError      E_ARCHITECTURE    unknown, once supported, not given
│   ├── ArchitectureImportError E_ARCHITECTURE_IMPORT   registered, but importing it failed
│   ├── PlanError              E_PLAN        carries .problems, all of them
│   ├── WeightLoadError        E_MODEL       a weight loader failed on one tensor
│   ├── TraceError             E_TRACE       the recorder met what it must not guess
│   └── CoverageError          E_COVERAGE    an element written never, or twice
├── PluginError                exit 1   E_PLUGIN  a plugin failed; names distribution and version
├── ResourceError              exit 1   E_MEMORY
├── DistributedError           exit 1   E_RANK E_RANK_MISMATCH   another rank failed, or the ranks
│                                       disagree
└── ReadFailure                exit 3   the machine or the network is at fault
    ├── ReadError              E_IO          carries .errno
    ├── WriteError             E_IO          carries .errno; what was there before is still there
    ├── DeviceError            E_DEVICE      an accelerator refused a copy, not for want of memory
    ├── DownloadError          E_DOWNLOAD E_TIMEOUT E_AUTH E_OFFLINE   a server, or its way: it
    │                                        answered wrong or not at all, not in time, refuses the
    │                                        credentials, is not reached
    ├── TruncatedError         E_TRUNCATED   the file ended before the tensor did
    └── ChangedError           E_CHANGED     the file changed while it was in use
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArchitectureError",
    "ArchitectureImportError",
    "ChangedError",
    "CheckpointError",
    "ConfigFileError",
    "ConflictError",
    "CoverageError",
    "DeviceError",
    "DistributedError",
    "DownloadError",
    "FormatError",
    "IndexFileError",
    "IntegrityError",
    "LoadkitError",
    "ManifestError",
    "ModelError",
    "NoWeightsError",
    "NotInstalledError",
    "OptionError",
    "PathError",
    "PlanError",
    "PluginError",
    "ReadError",
    "ReadFailure",
    "ResourceError",
    "ShardedError",
    "TraceError",
    "TruncatedError",
    "UnknownNameError",
    "UsageError",
    "WeightLoadError",
    "WriteError",
]


class LoadkitError(Exception):
    """What was asked, what was found, where, and what to do.

    Attributes:
        code: one word, ``E_...``; stable, for programs.
        file: the file's name inside the checkpoint (or its path), if one is at fault.
        tensor: the checkpoint tensor's name.
        offset: byte offset in ``file``.
        parameter: the model parameter's dotted name.
        detail: anything more a program may want (a plain JSON-able value).
        hint: what to do about it.
        rank: which of several ranks that load together it happened on; the message names it.
    """

    code: str = "E_LOADKIT"
    exit_code: int = 1
    rank: int | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        file: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        parameter: str | None = None,
        detail: Any = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        self.file = file
        self.tensor = tensor
        self.offset = offset
        self.parameter = parameter
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, dict(self.__dict__), self.__cause__))

    def to_dict(self) -> dict[str, Any]:
        """The error as JSON-able values (the CLI's ``--json`` form)."""
        keys = ("code", "message", "file", "tensor", "offset", "parameter", "detail", "hint")
        return {key: getattr(self, key) for key in keys}


def _rebuild(
    cls: type[LoadkitError], message: str, state: dict[str, Any], cause: BaseException | None
) -> LoadkitError:
    """Unpickle an error in another process, its cause included."""
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.__dict__.update(state)
    error.__cause__ = cause
    return error


class UsageError(LoadkitError):
    """The caller asked for something that cannot be."""

    code = "E_USAGE"
    exit_code = 2


class OptionError(UsageError):
    """An option's name, type or value is wrong."""

    code = "E_OPTION"


class UnknownNameError(UsageError):
    """No such load format, reader, source, method or model."""

    code = "E_UNKNOWN"


class NotInstalledError(UsageError):
    """A known name whose distribution is not installed; the hint says how to install it."""

    code = "E_NOT_INSTALLED"


class ConflictError(UsageError):
    """Two distributions claim one name; both are named."""

    code = "E_CONFLICT"


class CheckpointError(LoadkitError):
    """The files are at fault."""

    code = "E_CHECKPOINT"


class FormatError(CheckpointError):
    """A file breaks a rule of its format; the code says which."""

    code = "E_FORMAT"


class IndexFileError(CheckpointError):
    """The weight index does not describe the files beside it."""

    code = "E_INDEX"


class ConfigFileError(CheckpointError):
    """config.json cannot be used."""

    code = "E_CONFIG"


class PathError(CheckpointError):
    """A link, a device, or a path out of the folder."""

    code = "E_PATH"


class ManifestError(CheckpointError):
    """loadkit_manifest.json cannot be used."""

    code = "E_MANIFEST"


class IntegrityError(CheckpointError):
    """A file does not hold what its manifest, its hub or an earlier load says it does.

    ``detail`` has the range of bytes (``extent``), the tensors in it, and both digests.
    """

    code = "E_DIGEST"


class ShardedError(CheckpointError):
    """Rank files are missing, of another topology, or do not make up whole parameters."""

    code = "E_SHARDED"


class NoWeightsError(CheckpointError):
    """There is nothing that any load format reads."""

    code = "E_NO_WEIGHTS"


class ModelError(LoadkitError):
    """The model and the checkpoint do not fit."""

    code = "E_MODEL"


class ArchitectureError(ModelError):
    """The architecture is unknown, no longer supported, or not given."""

    code = "E_ARCHITECTURE"


class ArchitectureImportError(ModelError):
    """The architecture is registered, but importing its module failed (see the cause)."""

    code = "E_ARCHITECTURE_IMPORT"


class PlanError(ModelError):
    """The plan found problems. ``problems`` holds all of them, in order."""

    code = "E_PLAN"

    def __init__(self, message: str, *, problems: Any = (), **where: Any) -> None:
        super().__init__(message, **where)
        self.problems = tuple(problems)


class WeightLoadError(ModelError):
    """A weight loader failed on one tensor."""

    code = "E_MODEL"


class TraceError(ModelError):
    """The recorder met what it must not guess."""

    code = "E_TRACE"


class CoverageError(ModelError):
    """An element was never written, or written twice."""

    code = "E_COVERAGE"


class PluginError(LoadkitError):
    """A plugin failed; its distribution and version are named."""

    code = "E_PLUGIN"


class ResourceError(LoadkitError):
    """There is not enough memory."""

    code = "E_MEMORY"


class DistributedError(LoadkitError):
    """Another rank failed, or the ranks disagree."""

    code = "E_RANK"


class ReadFailure(LoadkitError):  # noqa: N818 - the branch; its leaves are errors
    """The machine or the network is at fault."""

    code = "E_IO"
    exit_code = 3


class ReadError(ReadFailure):
    """The operating system refused a read. ``errno`` is its number, or None."""

    def __init__(self, message: str, *, errno: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.errno = errno


class WriteError(ReadFailure):
    """The operating system refused a write; nothing that was there before has changed.

    ``errno`` is its number, or None.
    """

    def __init__(self, message: str, *, errno: int | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.errno = errno


class DeviceError(ReadFailure):
    """An accelerator failed at a copy, an allocation or a computation, and is not out of memory."""

    code = "E_DEVICE"


class DownloadError(ReadFailure):
    """A server answered wrong, late, not at all, or refuses the credentials; the code says which.

    Its text never holds a secret: addresses are shown without passwords and signatures.
    """

    code = "E_DOWNLOAD"


class TruncatedError(ReadFailure):
    """The file ended before the tensor did."""

    code = "E_TRUNCATED"


class ChangedError(ReadFailure):
    """The file changed while it was in use."""

    code = "E_CHANGED"
