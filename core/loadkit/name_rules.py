"""Rules over dotted names: tables of whole-component patterns, looked up by hashing.

A pattern is a run of dotted components. ``"model."`` is the component ``model`` with something
after it, ``".gamma"`` is ``gamma`` with something before it, ``"mlp"`` stands anywhere by itself.
A component is never cut: ``model`` does not match ``model_x``. A table answers by one hash lookup
per (position, pattern length), so the cost of a name does not grow with the number of rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from loadkit.errors import ModelError

__all__ = ["Hit", "Kind", "RegexTable", "Rule", "Table", "parse_run"]

Kind = Literal["rename", "regex", "substr", "prefix", "suffix", "stacked"]
Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: ``run`` becomes ``target`` (None: the tensor is dropped) and ``shard_id``.

    ``before`` and ``after`` say that something must stand there (a dot ended the pattern).
    """

    kind: Kind
    pattern: str
    run: Parts
    target: Parts | None
    shard_id: Any = None
    before: bool = False
    after: bool = False

    def __str__(self) -> str:
        if self.target is None:
            return f"{self.kind} rule {self.pattern!r} -> None"
        shard = "" if self.shard_id is None else f" (shard {self.shard_id!r})"
        return f"{self.kind} rule {self.pattern!r} -> {'.'.join(self.target)!r}{shard}"


@dataclass(frozen=True, slots=True)
class Hit:
    """``rule`` matches the components ``start`` to ``stop`` of a name."""

    start: int
    stop: int
    rule: Rule


def parse_run(text: str, kind: str) -> tuple[Parts, bool, bool]:
    """The components of a pattern, and whether a dot began and ended it.

    Raises:
        ModelError: an empty component (``"a..b"``).
    """
    before, after = text.startswith("."), len(text) > 1 and text.endswith(".")
    core = text[before : len(text) - after]
    run = tuple(core.split(".")) if core else ()
    if "" in run or (not run and text):
        raise ModelError(
            f"{kind} rule {text!r}: a pattern is a run of whole dotted components",
            code="MAPPER_PATTERN",
        )
    return run, before, after


class Table:
    """The rules of one kind, by the components they match.

    Raises:
        ModelError: MAPPER_PATTERN, a pattern that cannot match; MAPPER_CONFLICT, two patterns
            that are the same components lead to different targets.
    """

    def __init__(self, kind: Kind, rules: Mapping[str, Any]) -> None:
        self.runs: dict[Parts, Rule] = {}
        for pattern, target in rules.items():
            self._add(_rule(kind, pattern, target))
        self.lengths = sorted({len(run) for run in self.runs}, reverse=True)

    def _add(self, rule: Rule) -> None:
        known = self.runs.get(rule.run)
        if known is None:
            self.runs[rule.run] = rule
            return
        if (known.target, known.shard_id) != (rule.target, rule.shard_id):
            raise ModelError(
                f"{known} and {rule} match the same names and differ", code="MAPPER_CONFLICT"
            )
        # The same rule twice, dotted and undotted: it holds wherever either of them does.
        self.runs[rule.run] = Rule(
            rule.kind,
            min(known.pattern, rule.pattern),
            rule.run,
            rule.target,
            rule.shard_id,
            known.before and rule.before,
            known.after and rule.after,
        )

    def at(self, parts: Parts, start: int, length: int) -> Hit | None:
        """The rule for exactly the ``length`` components at ``start``, if it may stand there."""
        stop = start + length
        rule = self.runs.get(parts[start:stop])
        if rule is None or (rule.before and not start) or (rule.after and stop == len(parts)):
            return None
        return Hit(start, stop, rule)

    def leading(self, parts: Parts) -> Hit | None:
        """The longest rule at the front of a name."""
        for length in self.lengths:
            if length <= len(parts) and (hit := self.at(parts, 0, length)):
                return hit
        return None

    def trailing(self, parts: Parts) -> Hit | None:
        """The longest rule at the end of a name."""
        for length in self.lengths:
            if length <= len(parts) and (hit := self.at(parts, len(parts) - length, length)):
                return hit
        return None

    def anywhere(self, parts: Parts) -> list[Hit]:
        """Every place a rule matches: longest first, then leftmost."""
        return [
            hit
            for length in self.lengths
            for start in range(len(parts) - length + 1)
            if (hit := self.at(parts, start, length))
        ]


def _rule(kind: Kind, pattern: str, value: Any) -> Rule:
    """One rule, parsed and checked."""
    run, before, after = parse_run(pattern, kind)
    if not run and kind != "prefix":
        raise ModelError(f"{kind} rule '': only a prefix may be empty", code="MAPPER_PATTERN")
    if (kind == "prefix" and before) or (kind == "suffix" and after):
        raise ModelError(
            f"{kind} rule {pattern!r} could never match: nothing stands beyond that dot",
            code="MAPPER_PATTERN",
        )
    target, shard_id = value, None
    if kind == "stacked" and value is not None:
        try:
            target, shard_id = value
            hash(shard_id)
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"stacked rule {pattern!r} needs (new name, shard id), not {value!r}",
                code="MAPPER_PATTERN",
            ) from error
    if target is None:
        return Rule(kind, pattern, run, None, None, before, after)
    if not isinstance(target, str):
        raise ModelError(
            f"{kind} rule {pattern!r} leads to {target!r}, which is not a name",
            code="MAPPER_PATTERN",
        )
    return Rule(kind, pattern, run, parse_run(target, kind)[0], shard_id, before, after)


class RegexTable:
    """Regular expressions over the whole name: the one kind that may cut a component.

    The longest matched text wins. The cost of a name grows with the number of these rules.
    """

    def __init__(self, rules: Mapping[str | re.Pattern[str], str | None]) -> None:
        self.rules: dict[tuple[str, int], tuple[re.Pattern[str], str | None]] = {}
        for key, target in rules.items():
            try:
                pattern = re.compile(key)
            except re.error as error:
                raise ModelError(
                    f"regex rule {key!r} is not a regular expression: {error}",
                    code="MAPPER_PATTERN",
                ) from error
            found = self.rules.setdefault((pattern.pattern, pattern.flags), (pattern, target))
            if found[1] != target:
                raise ModelError(
                    f"regex rule {key!r} leads to {found[1]!r} and to {target!r}",
                    code="MAPPER_CONFLICT",
                )

    def match(self, name: str) -> tuple[str, str | None] | None:
        """(pattern, new name or None) of the rule with the longest match.

        Raises:
            ModelError: MAPPER_CONFLICT, two longest matches give different names;
                MAPPER_PATTERN, a replacement names a group that is not there.
        """
        best: tuple[int, str, str | None] | None = None
        for pattern, target in self.rules.values():
            found = pattern.search(name)
            if found is None:
                continue
            length = found.end() - found.start()
            if best is not None and length < best[0]:
                continue
            new = _expanded(name, found, target)
            if best is not None and length == best[0] and new != best[2]:
                raise ModelError(
                    f"regex rules {best[1]!r} and {pattern.pattern!r} both match {length} "
                    f"characters of {name!r} and give {best[2]!r} and {new!r}",
                    code="MAPPER_CONFLICT",
                    tensor=name,
                )
            if best is None or length > best[0] or pattern.pattern < best[1]:
                best = (length, pattern.pattern, new)
        return None if best is None else best[1:]


def _expanded(name: str, found: re.Match[str], target: str | None) -> str | None:
    """The name with the matched text replaced, or None for a drop."""
    if target is None:
        return None
    try:
        return name[: found.start()] + found.expand(target) + name[found.end() :]
    except (re.error, IndexError) as error:
        raise ModelError(
            f"regex rule {found.re.pattern!r}: cannot expand {target!r}: {error}",
            code="MAPPER_PATTERN",
        ) from error
