"""What a person needs when names do not match: wrappers taken off, likely prefixes, summaries."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable

from loadkit.errors import WeightLoadError
from loadkit.text import printable

__all__ = ["WRAPPERS", "any_wrapped", "grouped_names", "likely_prefix", "strip_wrappers"]

log = logging.getLogger("loadkit")

# What DDP, torch.compile, FSDP and activation checkpointing put into the names they save.
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def any_wrapped(names: Iterable[str]) -> bool:
    """Whether ``strip_wrappers`` may have something to do: told quickly, and for most by no."""
    text = "\n".join(names)
    return any(wrapper in text for wrapper in WRAPPERS)


def strip_wrappers(names: Iterable[str], module_component_names: Collection[str]) -> dict[str, str]:
    """Every name, and the name without the components that training wrappers put into it.

    A wrapper goes wherever it stands as a whole component, as often as it stands there, unless
    the model has a submodule or parameter of that name (one of ``module_component_names``, the
    components of its dotted names). What was removed is logged once.

    Raises:
        WeightLoadError: NAME_COLLISION, two names are one without their wrappers.
    """
    removable = WRAPPERS - set(module_component_names)
    cleaned: dict[str, str] = {}
    owner: dict[str, str] = {}
    removed: Counter[str] = Counter()
    for name in names:
        new, parts = name, name.split(".")
        if not removable.isdisjoint(parts[:-1]):
            removed.update({part for part in parts[:-1] if part in removable})
            new = ".".join([part for part in parts[:-1] if part not in removable] + parts[-1:])
        if owner.setdefault(new, name) != name:
            raise WeightLoadError(
                f"tensors '{printable(owner[new])}' and '{printable(name)}' are one name without "
                f"the components that training wrappers add ({', '.join(sorted(removable))})",
                code="NAME_COLLISION",
                tensor=name,
                detail={"names": [owner[new], name]},
            )
        cleaned[name] = new
    for part, count in sorted(removed.items()):
        log.info("%d tensor names were saved through a wrapper: %r is taken off", count, part)
    return cleaned


def likely_prefix(unmatched: Collection[str], parameters: Collection[str]) -> str | None:
    """One change of prefix that makes the unmatched names match, said as a hint; or None.

    Looks for ``added``, ``removed`` and ``replaced`` prefixes by lining up the ends of names. A
    change that helps fewer than half of the names is not likely.
    """
    known = set(parameters)
    names = [name for name in unmatched if name not in known]
    if not names or not known:
        return None
    best, matched = None, 0
    for old, new in _prefix_changes(names[:: max(1, len(names) // 8)][:8], known):
        hits = sum(new + n[len(old) :] in known for n in names if n.startswith(old))
        if hits > matched:
            best, matched = (old, new), hits
    if best is None or matched * 2 < len(names):
        return None
    share = f"all {matched}" if matched == len(names) else f"{matched} of {len(names)}"
    old, new = (printable(part) for part in best)
    if not old:
        return f"{share} names match if '{new}' is added"
    return f"{share} names match if '{old}' is " + (f"replaced by '{new}'" if new else "removed")


def _prefix_changes(samples: list[str], known: set[str]) -> list[tuple[str, str]]:
    """(old prefix, new prefix) pairs that turn a sample into a known name; the smallest first."""
    ends: dict[str, list[str]] = {}
    wanted = {end for name in samples for end in _ends(name)}
    for parameter in known:
        for end in _ends(parameter):
            if end in wanted:
                ends.setdefault(end, []).append(parameter)
    changes: dict[tuple[str, str], None] = {}
    for name in samples:
        for end in _ends(name):
            for parameter in ends.get(end, ())[:16]:
                changes[name[: -len(end)], parameter[: -len(end)]] = None
    return sorted(changes, key=lambda c: (len(c[0]) + len(c[1]), c))[:64]


def _ends(name: str) -> list[str]:
    """The name without 0 to 4 leading components, never less than two (one, if that is all)."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(min(5, max(1, len(parts) - 1)))]


def grouped_names(names: Iterable[str], limit: int = 10) -> list[str]:
    """Names in few lines: numbered ones together, ``layers 0-47: 48 x mlp.gate_proj.weight``.

    The first numeric component makes the range, later ones become ``*``. At most ``limit`` lines
    and one that counts the rest.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if _is_number(part)), None)
        if at is None:
            groups.setdefault((name, ""), []).append(-1)
            continue
        rest = ".".join("*" if _is_number(part) else part for part in parts[at + 1 :])
        groups.setdefault((".".join(parts[:at]), rest), []).append(int(parts[at]))
    lines = [_line(stem, rest, numbers) for (stem, rest), numbers in groups.items()]
    if len(lines) > limit:
        hidden = sum(len(numbers) for numbers in list(groups.values())[limit:])
        lines[limit:] = [f"... and {hidden} more"]
    return lines


def _line(stem: str, rest: str, numbers: list[int]) -> str:
    """One group as a line."""
    if numbers[0] < 0:
        return printable(stem)
    if len(numbers) == 1:
        return printable(".".join(p for p in (stem, str(numbers[0]), rest) if p))
    return f"{printable(stem)} {_ranges(sorted(set(numbers)))}: {len(numbers)} x {printable(rest)}"


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as ``0-2,5``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def _is_number(part: str) -> bool:
    """A component that is a layer's or an expert's number (of a sane length)."""
    return len(part) <= 9 and part.isascii() and part.isdigit()
