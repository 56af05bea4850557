"""llama.cpp, asked in a process of its own what comes after a prompt.

Its wheel is fetched and unzipped, not installed (34 MB); it stays in ``.cache/llama_cpp``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["first_tokens", "wheel_folder"]

REQUIREMENT = "xllamacpp==2026.10.11549"
ROOT = Path(__file__).resolve().parents[2]

_CHILD = """
import json, sys
given = json.loads(sys.argv[1])
sys.path.insert(0, given["wheel"])
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = given["model"]
params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
params.cpuparams.n_threads = 2
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(params)
found = []
for prompt in given["prompts"]:
    asked = {"prompt": prompt, "max_tokens": 1, "n_probs": 10, "temperature": 0, "stream": False}
    answer = server.handle_completions(asked)
    if isinstance(answer, str):
        answer = json.loads(answer)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    found.append([[one["id"], one["logprob"]] for one in token["top_logprobs"]])
print("FOUND" + json.dumps(found))
"""


def wheel_folder() -> Path:
    """The unzipped wheel; skips where it cannot be had, or is for another machine."""
    folder = ROOT / ".cache" / "llama_cpp" / REQUIREMENT.partition("==")[2]
    if not (folder / "xllamacpp").is_dir():
        download = folder / "wheel"
        download.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
        command = [*pip, "--no-deps", "--only-binary=:all:", "-d", str(download), REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no wheel of {REQUIREMENT} to be had: {done.stderr.strip()[-300:]}")
        (wheel,) = download.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "new")
        wheel.unlink()
        (folder / "new/xllamacpp").rename(folder / "xllamacpp")
    return folder


def first_tokens(model: Path, prompts: Sequence[str]) -> list[list[tuple[int, float]]]:
    """For each prompt the ten likeliest next tokens: id and log-probability."""
    given: dict[str, Any] = {"model": str(model), "prompts": list(prompts)}
    given["wheel"] = str(wheel_folder())
    command = [sys.executable, "-c", _CHILD, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    line = next((one for one in done.stdout.splitlines() if one.startswith("FOUND")), None)
    assert done.returncode == 0 and line is not None, done.stderr[-3000:]
    return [[(int(i), float(p)) for i, p in one] for one in json.loads(line[len("FOUND") :])]
