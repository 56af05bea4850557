"""Conversions that are killed, and system calls that fail in a process of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.saving import contents

__all__ = ["ENVIRON", "HIDDEN", "MANIFEST", "hidden", "new_and_old", "same_result", "shim"]

HIDDEN = ".loadkit-convert-"
MANIFEST = "loadkit_manifest.json"
ENVIRON = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}

# Fails the call number FI_AT (from 1) of FI_CALL with FI_ERRNO; counts calls on paths with FI_PATH.
_SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <sys/types.h>

static int calls;

static int hit(const char *call, const char *path) {
    const char *wanted = getenv("FI_CALL"), *part = getenv("FI_PATH");
    if (!wanted || strcmp(wanted, call) || !path || (part && !strstr(path, part))) return 0;
    if (__sync_add_and_fetch(&calls, 1) != atoi(getenv("FI_AT"))) return 0;
    errno = atoi(getenv("FI_ERRNO"));
    return 1;
}

static const char *path_of(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, out, 4095);
    if (size < 0) return 0;
    out[size] = 0;
    return out;
}

#define REAL(name) ((__typeof__(&name)) dlsym(RTLD_NEXT, #name))

int fsync(int fd) {
    char path[4096];
    return hit("fsync", path_of(fd, path)) ? -1 : REAL(fsync)(fd);
}
ssize_t write(int fd, const void *data, size_t size) {
    char path[4096];
    return hit("write", path_of(fd, path)) ? -1 : REAL(write)(fd, data, size);
}
int rename(const char *a, const char *b) { return hit("rename", b) ? -1 : REAL(rename)(a, b); }
int renameat(int x, const char *a, int y, const char *b) {
    return hit("rename", b) ? -1 : REAL(renameat)(x, a, y, b);
}
int renameat2(int x, const char *a, int y, const char *b, unsigned int flags) {
    return hit("rename", b) ? -1 : REAL(renameat2)(x, a, y, b, flags);
}
"""


def shim(folder: Path) -> Path:
    """A library to preload that makes calls fail; skips where no compiler is."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the shim with")
    source, library = folder / "shim.c", folder / "shim.so"
    source.write_text(_SHIM)
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the shim does not build: {done.stderr}")
    return library


def hidden(folder: Path) -> list[Path]:
    """What conversions to folders in this one left."""
    return sorted(folder.rglob(f"{HIDDEN}*"))


def same_result(found: Mapping[str, bytes], expected: Mapping[str, bytes]) -> bool:
    """Whether two targets are the same files; their manifests name their sources."""
    bare = [{k: v for k, v in one.items() if k != MANIFEST} for one in (found, expected)]
    return bare[0] == bare[1] and (MANIFEST in found) == (MANIFEST in expected)


def new_and_old(folder: Path) -> tuple[Path, dict[str, bytes]]:
    """A source in ``folder/a``, and an older conversion, another dtype, in ``folder/out``."""
    import loadkit

    write_llama(folder / "a", hidden=32, ffn=64, vocab=300, layers=3)
    loadkit.convert(folder / "a", folder / "out", dtype=torch.bfloat16)
    return folder / "a", contents(folder / "out")
