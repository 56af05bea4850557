"""What load format ``tensorizer`` takes in ``model_loader_extra_config``: vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from loadkit.options import OptionSpec

__all__ = ["LOAD_OPTIONS", "SAVE_OPTIONS"]

_URI = OptionSpec(
    "tensorizer_uri",
    str,
    None,
    "the file, or with %03d in its name one of each rank: a name in the source, a path, or a URI",
)
_KEY = OptionSpec(
    "encryption_keyfile", Path, None, "file of the 32 bytes that tensors are encrypted with"
)

LOAD_OPTIONS: Mapping[str, OptionSpec] = {
    "tensorizer_uri": _URI,
    "num_readers": OptionSpec(
        "num_readers", int, None, "threads that read a plain file; None decides", low=1, high=1024
    ),
    "verify_hash": OptionSpec(
        "verify_hash", bool, True, "compare every tensor that is used with its hash"
    ),
    "encryption_keyfile": _KEY,
    "s3_access_key_id": OptionSpec("s3_access_key_id", str, None, "of s3:// URIs"),
    "s3_secret_access_key": OptionSpec("s3_secret_access_key", str, None, "of s3:// URIs"),
    "s3_endpoint": OptionSpec("s3_endpoint", str, None, "of s3:// URIs; http:// is plain text"),
}

SAVE_OPTIONS: Mapping[str, OptionSpec] = {
    "tensorizer_uri": OptionSpec(
        "tensorizer_uri",
        str,
        None,
        "name of the file in the folder; with %03d in it each rank writes what it holds",
    ),
    "encryption_keyfile": OptionSpec(
        "encryption_keyfile", Path, None, "encrypt with this file's key; made where it is missing"
    ),
    "save_id": OptionSpec(
        "save_id",
        str,
        "",
        "one word for the ranks of one save, where they are processes of no process group",
    ),
}
