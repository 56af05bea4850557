"""The process that renders one chat template. Run by ``chat_template.py``, never imported.

Reads one JSON request from standard input and writes one JSON answer. What most templates need is
imported before the limits are set, so that the memory they allow is the template's own.
"""

from __future__ import annotations

import datetime
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, NoReturn


class Refused(Exception):  # noqa: N818 - what a template raises on purpose
    """The template's own ``raise_exception``."""


class TooLong(Exception):  # noqa: N818
    """More output than allowed."""


def raise_exception(message: object) -> NoReturn:
    """What templates call when the messages do not suit them."""
    raise Refused(str(message))


def strftime_now(form: str) -> str:
    """The local time, as templates write a date."""
    return datetime.datetime.now().astimezone().strftime(form)


def tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read: nothing is escaped for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> Any:
    """The sandbox, with the names that published templates use."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the model's words for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own form

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    made.filters["tojson"] = tojson
    made.globals = {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        **{name: made.globals[name] for name in ("range", "dict", "namespace", "joiner", "cycler")},
    }
    return made


def set_limits(memory: int, cpu_seconds: int) -> None:
    """From here on: this much more memory and time, and no byte into any file."""
    used = 0
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no such file system: time and output alone are bounded
        pass
    wanted = {resource.RLIMIT_FSIZE: 0, resource.RLIMIT_CORE: 0}
    wanted[resource.RLIMIT_CPU] = int(time.process_time()) + cpu_seconds
    if used:
        wanted[resource.RLIMIT_AS] = used + memory
    for kind, limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        least = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(kind, (least, least))
        except (OSError, ValueError):  # a system that does not have this one
            pass


def render(made: Any, template: str, context: dict[str, Any], most: int) -> str:
    """The text, as long as it is not too long."""
    stream = made.from_string(template).generate(**context)
    pieces: list[str] = []
    size = 0
    for piece in stream:
        size += len(piece)
        if size > most:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


def answer() -> dict[str, str]:
    """What became of the request."""
    request = json.load(sys.stdin)
    sys.path[:] = request["sys_path"]
    made = environment()
    made.from_string("{% for x in [1] %}{{ '\\n' + x | tojson }}{% endfor %}").render()  # imports
    memory = request["max_memory"]
    set_limits(memory, request["cpu_seconds"])
    try:
        context = json.loads(request["context"])
        return {"text": render(made, request["template"], context, request["max_output"])}
    except Refused as problem:
        return {"error": "refused", "message": str(problem)[:2000]}
    except TooLong:
        return {"error": "limit", "message": f"{request['max_output']} characters"}
    except (MemoryError, RecursionError) as problem:
        kind = "recursion" if isinstance(problem, RecursionError) else f"{memory >> 20} MiB"
        return {"error": "limit", "message": kind}
    except Exception as problem:  # noqa: BLE001 - the answer says it
        return {"error": "failed", "message": f"{type(problem).__name__}: {problem}"[:2000]}


def main() -> None:
    """Answer, and end at once: nothing of a template is left to run."""
    said = json.dumps(answer())
    sys.stdout.write(said)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
