"""Checkpoint tensors that a model may do without, each by a rule with a reason.

Patterns are runs of whole dotted components that stand anywhere in a name; ``*`` is any one
component. A dot at an end asks for something more there: ``"cls."`` is a component ``cls`` with
something after it. A rule is asked only about a tensor that the model has no place for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from loadkit.name_rules import parse_run

__all__ = ["HARMLESS", "IgnoredWeight", "IgnoredWeights", "harmless_reason"]


@dataclass(frozen=True, slots=True)
class IgnoredWeight:
    """Tensors whose name matches ``pattern`` (and that have ``ndim`` dims, if it is given)."""

    pattern: str
    reason: str
    ndim: int | None = None


_ROTARY = "rotary tables are computed from the config"
_MASK = "a causal mask, which attention makes itself"

# Known in the field: what exporters leave in checkpoints and no model reads.
HARMLESS: tuple[IgnoredWeight, ...] = (
    IgnoredWeight("rotary_emb.inv_freq", _ROTARY),
    IgnoredWeight("rotary_pos_emb.inv_freq", _ROTARY),
    IgnoredWeight("rotary_emb.cos_cached", _ROTARY),
    IgnoredWeight("rotary_emb.sin_cached", _ROTARY),
    IgnoredWeight("rotary_emb.cos_sin_cache", _ROTARY),
    IgnoredWeight("masked_bias", "the constant that masked scores were set to"),
    IgnoredWeight("attn.bias", _MASK, ndim=4),
    IgnoredWeight("attention.bias", _MASK, ndim=4),
    IgnoredWeight("self_attn.bias", _MASK, ndim=4),
    IgnoredWeight("position_ids", "positions are counted, not stored"),
    IgnoredWeight("embeddings.token_type_ids", "a buffer of zeros"),
    IgnoredWeight("num_batches_tracked", "it counts training steps"),
)


class IgnoredWeights:
    """A set of rules, asked by name.

    Raises:
        ModelError: a pattern with an empty component.
    """

    def __init__(self, rules: Iterable[IgnoredWeight | str]) -> None:
        self._rules: list[tuple[re.Pattern[str], IgnoredWeight]] = []
        for rule in rules:
            if isinstance(rule, str):
                rule = IgnoredWeight(rule, f"the model's ignored_weights has {rule!r}")
            self._rules.append((_compiled(rule.pattern), rule))

    def reason(self, name: str, shape: Sequence[int] | None = None) -> str | None:
        """Why a tensor may be left out, or None if no rule says so."""
        for pattern, rule in self._rules:
            if pattern.search(name) and (
                rule.ndim is None or (shape is not None and len(shape) == rule.ndim)
            ):
                return rule.reason
        return None


def _compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of whole components as a regular expression."""
    run, before, after = parse_run(pattern, "ignored_weights")
    body = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in run)
    return re.compile((r"\." if before else r"(?:^|\.)") + body + (r"\." if after else r"(?:\.|$)"))


_HARMLESS = IgnoredWeights(HARMLESS)


def harmless_reason(name: str, shape: Sequence[int] | None = None) -> str | None:
    """Why a tensor that no model reads may be left out, or None if it is none of the known."""
    return _HARMLESS.reason(name, shape)
