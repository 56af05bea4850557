"""A chat template, rendered in a process of its own with limits of memory, time and output.

A template is a program from the checkpoint. jinja2's sandbox keeps it from Python's insides, but
not from loops, recursion and strings without end, which no check inside the process can bound all
of. So it runs in a child without the parent's environment, where the kernel sets the limits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from loadkit.errors import FormatError, OptionError, PluginError
from loadkit.text import printable
from loadkit.tokenization.libraries import need

__all__ = [
    "CPU_SECONDS",
    "MAX_INPUT",
    "MAX_MEMORY",
    "MAX_OUTPUT",
    "MAX_TEMPLATE",
    "WALL_SECONDS",
    "render_chat_template",
]

MAX_TEMPLATE = 256 << 10  # bytes
MAX_INPUT = 16 << 20  # bytes of messages and variables, as JSON
MAX_OUTPUT = 16 << 20  # characters of text, beyond twice the input
MAX_MEMORY = 64 << 20  # bytes beyond the interpreter's and eight times the input
CPU_SECONDS = 2  # with the imports
WALL_SECONDS = 20.0  # on a busy machine two seconds of CPU take longer

_CHILD = Path(__file__).with_name("template_child.py")
_KEPT = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "TZ", "SYSTEMROOT")


def render_chat_template(template: str, context: Mapping[str, Any]) -> str:
    """The text that ``template`` makes of ``context``.

    Args:
        template: jinja2 source, untrusted.
        context: ``messages``, ``bos_token`` and what else it may read; JSON-able values.

    Raises:
        OptionError: the context is not JSON-able or too large, or the template refuses it (its
            ``raise_exception``: roles that do not alternate, say).
        FormatError: ``E_TEMPLATE`` the template is broken or does what the sandbox forbids;
            ``E_LIMIT`` it is too large, or goes over a limit of time, memory or output.
        NotInstalledError: jinja2 is not installed.
    """
    need("jinja2", "a chat template")
    size = len(template.encode("utf-8", "replace"))
    if size > MAX_TEMPLATE:
        message = f"the chat template has {size} bytes, more than the {MAX_TEMPLATE} allowed"
        raise FormatError(message, code="E_LIMIT")
    try:
        given = json.dumps(dict(context))
    except (TypeError, ValueError, RecursionError) as problem:
        raise OptionError(f"a chat must be made of JSON values: {printable(problem)}") from None
    if len(given) > MAX_INPUT:
        message = f"the chat has {len(given)} bytes, more than the {MAX_INPUT} a template may get"
        raise OptionError(message)
    request = {
        "sys_path": [path for path in sys.path if path],
        "template": template,
        "context": given,
        "max_output": MAX_OUTPUT + 2 * len(given),
        "max_memory": MAX_MEMORY + 8 * len(given),
        "cpu_seconds": CPU_SECONDS,
    }
    return _answer(_run(json.dumps(request)))


def _run(request: str) -> subprocess.CompletedProcess[bytes]:
    """The child's answer, whatever became of it."""
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    try:
        return subprocess.run(
            command, input=request.encode(), capture_output=True, timeout=WALL_SECONDS,
            env=environment, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        _over(f"{WALL_SECONDS:g} seconds")
    except OSError as problem:
        raise PluginError(
            f"no process could be started to render the chat template: {problem}",
            hint="give the prompt as plain text",
        ) from problem


def _answer(done: subprocess.CompletedProcess[bytes]) -> str:
    """The text out of the child's answer, or its error as one of ours."""
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            _over(f"{CPU_SECONDS} seconds of CPU")
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise FormatError(
            f"the chat template ended its process with {done.returncode}: {printable(said[-1])}",
            code="E_TEMPLATE",
        ) from None
    if "text" in answer:
        text: str = answer["text"]
        return text
    problem = printable(answer["message"], 500, ascii_only=False)
    if answer["error"] == "limit":
        _over(problem)
    if answer["error"] == "refused":
        raise OptionError(f"the chat template refuses these messages: {problem}")
    raise FormatError(f"the chat template failed: {problem}", code="E_TEMPLATE")


def _over(limit: str) -> NoReturn:
    raise FormatError(f"the chat template went over its limit of {limit}", code="E_LIMIT")
