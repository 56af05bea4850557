r"""From a checkpoint's names to a model's: ``WeightsMapper``.

Six kinds of rules run in this fixed order, each on what the kinds before it gave:

1. ``rename``: the whole name. It settles the name; of the others only ``stacked`` still runs.
2. ``regex``: ``re.search`` over the whole name, the first match is replaced (``\1`` works).
3. ``substr``: runs of whole components anywhere. One pass over the name as it came in: matches do
   not overlap, the longest wins, then the leftmost, and each rule applies to one place.
4. ``prefix``: whole leading components. ``""`` matches every name.
5. ``suffix``: whole trailing components, so ``".gamma": ".weight"`` is the old LayerNorm name.
6. ``stacked``: a run of whole components becomes a part of a fused parameter:
   ``"q_proj": ("qkv_proj", "q")``. The longest wins, then the rightmost.

Within a kind the longest pattern wins (in components; for regex in characters), whatever order
the rules or the tensors have. Two patterns of the same components with different targets are an
error when the mapper is made. A kind fires once per name and never sees its own output, so a
mapper need not be idempotent: ``{"": "model."}`` adds ``model.`` each time it is applied. To
accept both spellings write ``{"": "model.", "model.": "model."}``. A target of None drops the
tensor; that is reported with the rule as the reason.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from loadkit.errors import ModelError, WeightLoadError
from loadkit.known_ways import KnownWays
from loadkit.map_steps import Explanation, MappedName, Step
from loadkit.name_rules import Hit, Kind, Parts, RegexTable, Table
from loadkit.packed_modules import Packed
from loadkit.sharded_name import ShardedName
from loadkit.text import printable
from loadkit.tracing import report_misfit

if TYPE_CHECKING:
    from loadkit.reverse_mapper import ReverseMapper

TensorT = TypeVar("TensorT")

__all__ = ["Explanation", "MappedName", "ShardedName", "Step", "WeightsMapper"]

log = logging.getLogger("loadkit")


Targets = Mapping[str, str | None]


class WeightsMapper:
    """Declarative rules from checkpoint names to model names; see the module for what they mean.

    Raises:
        ModelError: MAPPER_PATTERN for a rule that is not one, MAPPER_CONFLICT for two rules that
            match the same names and lead elsewhere.
    """

    def __init__(
        self,
        orig_to_new_prefix: Targets | None = None,
        orig_to_new_suffix: Targets | None = None,
        orig_to_new_substr: Targets | None = None,
        orig_to_new_regex: Mapping[str | re.Pattern[str], str | None] | None = None,
        orig_to_new_rename: Targets | None = None,
        orig_to_new_stacked: Mapping[str, tuple[str, Any] | None] | None = None,
    ) -> None:
        self.orig_to_new_prefix = dict(orig_to_new_prefix or {})
        self.orig_to_new_suffix = dict(orig_to_new_suffix or {})
        self.orig_to_new_substr = dict(orig_to_new_substr or {})
        self.orig_to_new_regex = dict(orig_to_new_regex or {})
        self.orig_to_new_rename = dict(orig_to_new_rename or {})
        self.orig_to_new_stacked = dict(orig_to_new_stacked or {})
        self._prefix = Table("prefix", self.orig_to_new_prefix)
        self._suffix = Table("suffix", self.orig_to_new_suffix)
        self._substr = Table("substr", self.orig_to_new_substr)
        self._regex = RegexTable(self.orig_to_new_regex)
        self._stacked = Table("stacked", self.orig_to_new_stacked)
        self._ways = KnownWays(self)

    @property
    def tables(self) -> dict[Kind, Table]:
        """The parsed rules by kind, for all kinds made of component runs."""
        return {
            "prefix": self._prefix,
            "suffix": self._suffix,
            "substr": self._substr,
            "stacked": self._stacked,
        }

    @property
    def stacks(self) -> bool:
        """Whether there is any stacked rule."""
        return bool(self.orig_to_new_stacked)

    @property
    def stacked_parts(self) -> Packed:
        """The stacked rules by the last component of what they match, for hints."""
        return {
            run[-1]: ((rule.target[-1], rule.shard_id),)
            for run, rule in self._stacked.runs.items()
            if rule.target
        }

    def map_name(self, name: str) -> MappedName | None:
        """Where ``name`` goes, or None if a rule drops it.

        Raises:
            ModelError: two regex rules tie, or the rules leave an empty name.
        """
        return self._run(name, [])

    def explain(self, name: str) -> Explanation:
        """Every rule that fires on ``name`` and what it does; ``str()`` of it is for people."""
        steps: list[Step] = []
        result = self._run(name, steps)
        return Explanation(name, tuple(steps), result)

    def apply(
        self, weights: Iterable[tuple[str, TensorT]]
    ) -> Iterator[tuple[ShardedName, TensorT]]:
        """The same tensors under their model names; dropped ones are reported and left out.

        Raises:
            WeightLoadError: NAME_COLLISION, two checkpoint names lead to one place; names both.
        """
        taken: dict[MappedName, str] = {}
        for name, tensor in weights:
            steps: list[Step] = []
            mapped = self._ways.find(name)
            if mapped is None and (mapped := self._run(name, steps)) is not None:
                self._ways.learn(name, mapped)
            new = ShardedName(name if mapped is None else mapped.name, like=name)
            if mapped is None:
                reason = f"left out by the mapper's {steps[-1]}"
                report_misfit("SKIPPED", name=new.checkpoint_name, message=reason)
                log.debug("%s %s", printable(new.checkpoint_name), reason)
                continue
            if mapped.shard_id is not None:
                new.shard_id = mapped.shard_id
            place = mapped if mapped[1] == new.shard_id else MappedName(mapped[0], new.shard_id)
            if place in taken:
                _collide(taken[place], new)
                continue
            taken[place] = new.checkpoint_name
            yield new, tensor

    def reverse(self, known: Collection[str] = ()) -> ReverseMapper:
        """The way back, from (parameter, shard) to the checkpoint's name, where it is unique.

        ``known`` are names that a checkpoint had; of several that would do, such a one is chosen.
        """
        from loadkit.reverse_mapper import ReverseMapper

        return ReverseMapper(self, known)

    def __or__(self, other: WeightsMapper) -> WeightsMapper:
        """The rules of both.

        Raises:
            ModelError: MAPPER_CONFLICT, a pattern leads to different targets in them.
        """
        if not isinstance(other, WeightsMapper):
            return NotImplemented
        return WeightsMapper(**{key: _merged(key, self, other) for key in _KINDS})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightsMapper):
            return NotImplemented
        return all(getattr(self, key) == getattr(other, key) for key in _KINDS)

    __hash__ = None  # type: ignore[assignment]  # it holds dicts

    def __repr__(self) -> str:
        given = [f"{key}={getattr(self, key)!r}" for key in _KINDS if getattr(self, key)]
        return f"WeightsMapper({', '.join(given)})"

    def _run(self, name: str, steps: list[Step]) -> MappedName | None:
        """The pipeline; notes every rule that fires."""
        current: str | None = str(name)
        if name in self.orig_to_new_rename:
            current = self.orig_to_new_rename[name]
            steps.append(Step("rename", name, name, current))
        else:
            current = self._run_patterns(current, steps)
        if current is None:
            return None
        shard_id = None
        if self._stacked.runs and (hits := self._stacked.anywhere(tuple(current.split(".")))):
            best = max(hits, key=lambda hit: (hit.stop - hit.start, hit.start))
            current, shard_id = self._replace("stacked", current, [best], steps), best.rule.shard_id
            if current is None:
                return None
        if not current:
            raise ModelError(
                f"the mapper leaves nothing of the name '{printable(name)}'",
                code="MAPPER_PATTERN",
                tensor=str(name),
            )
        return MappedName(current, shard_id)

    def _run_patterns(self, name: str | None, steps: list[Step]) -> str | None:
        """Regex, substr, prefix and suffix, in this order."""
        if name is not None and (found := self._regex.match(name)):
            steps.append(Step("regex", found[0], name, found[1]))
            name = found[1]
        if name is not None and self._substr.runs:
            hits = _without_overlaps(self._substr.anywhere(tuple(name.split("."))))
            name = self._replace("substr", name, hits, steps)
        if name is not None and self._prefix.runs:
            hit = self._prefix.leading(tuple(name.split(".")))
            name = self._replace("prefix", name, [hit] if hit else [], steps)
        if name is not None and self._suffix.runs:
            hit = self._suffix.trailing(tuple(name.split(".")))
            name = self._replace("suffix", name, [hit] if hit else [], steps)
        return name

    @staticmethod
    def _replace(kind: Kind, name: str, hits: list[Hit], steps: list[Step]) -> str | None:
        """The name with every hit replaced, all at once; one step per rule."""
        if not hits:
            return name
        parts: Parts = tuple(name.split("."))
        for hit in sorted(hits, key=lambda hit: -hit.start):
            if hit.rule.target is None:
                steps.append(Step(kind, hit.rule.pattern, name, None))
                return None
            parts = parts[: hit.start] + hit.rule.target + parts[hit.stop :]
        new = ".".join(parts)
        steps.extend(Step(kind, h.rule.pattern, name, new, h.rule.shard_id) for h in hits)
        return new


_KINDS = (
    "orig_to_new_prefix",
    "orig_to_new_suffix",
    "orig_to_new_substr",
    "orig_to_new_regex",
    "orig_to_new_rename",
    "orig_to_new_stacked",
)


def _without_overlaps(hits: list[Hit]) -> list[Hit]:
    """The hits that apply: longest first, none over another, each rule in one place."""
    chosen: list[Hit] = []
    for hit in hits:
        if all(hit.stop <= o.start or hit.start >= o.stop for o in chosen) and all(
            hit.rule is not o.rule for o in chosen
        ):
            chosen.append(hit)
    return sorted(chosen, key=lambda hit: hit.start)


def _merged(key: str, a: WeightsMapper, b: WeightsMapper) -> dict[Any, Any]:
    """One kind's rules of both mappers."""
    mine, others = getattr(a, key), getattr(b, key)
    for pattern in mine.keys() & others.keys():
        if mine[pattern] != others[pattern]:
            raise ModelError(
                f"{key}[{pattern!r}] leads to {mine[pattern]!r} in one mapper and to "
                f"{others[pattern]!r} in the other",
                code="MAPPER_CONFLICT",
            )
    return {**mine, **others}


def _collide(first: str, new: ShardedName) -> None:
    """Report, or raise, that two checkpoint tensors lead to one place."""
    shard = "" if new.shard_id is None else f" (shard {new.shard_id!r})"
    message = (
        f"tensors '{printable(first)}' and '{printable(new.checkpoint_name)}' both lead to "
        f"'{printable(new.path)}'{shard}; "
        "a place takes one"
    )
    hint = "drop one of them with a rule that leads to None"
    if not report_misfit(
        "UNEXPECTED", name=new.checkpoint_name, target=new.path, message=message, hint=hint
    ):
        raise WeightLoadError(
            message,
            code="NAME_COLLISION",
            tensor=new.checkpoint_name,
            parameter=new.path,
            detail={"names": [first, new.checkpoint_name]},
            hint=hint,
        )
