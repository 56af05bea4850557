"""``AutoWeightsLoader``: walks a module tree and gives every checkpoint tensor to its parameter.

Names are grouped by their first component at each module, so the work is linear in the names. A
child with a ``load_weights`` of its own gets its tensors under names relative to it, once, whatever
order they came in (a stream of tensors in memory is passed on as it comes instead: then such a
child is called for each run of neighbours). Everything else ends at a parameter's
``weight_loader``, or ``default_weight_loader``.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from loadkit.errors import WeightLoadError
from loadkit.ignored_weights import IgnoredWeights, harmless_reason
from loadkit.packed_modules import Packed, find_fused, invert_packed
from loadkit.sharded_name import ShardedName
from loadkit.text import printable
from loadkit.tracing import report_misfit
from loadkit.tracing.known_copies import run_loader
from loadkit.tracing.lazy_tensor import LazyTensor, Offered
from loadkit.tracing.observed import offers_of
from loadkit.weight_errors import (
    Unplaced,
    describe_failure,
    file_of,
    members_of,
    ranks_of,
    unplaced_error,
    why_unplaced,
)
from loadkit.weight_loaders import default_weight_loader

if TYPE_CHECKING:
    from loadkit.mapper import WeightsMapper

__all__ = ["AutoWeightsLoader"]

log = logging.getLogger("loadkit")

# A tensor under its name in the loader's module, and that name's components.
Item = tuple[ShardedName, list[str], "torch.Tensor | Offered"]


class AutoWeightsLoader:
    """Loads weights into a module by their names.

    Args:
        module: where they go. Its own ``load_weights`` is not called, its descendants' are.
        skip_prefixes: tensors whose mapped name begins with one of these (whole components) are
            left out, with a report.
        skip_substrs: the same for names that contain one of these, as plain text.
        ignore_unexpected_prefixes: such a tensor may be without a place (whole components).
        ignore_unexpected_suffixes: the same for names that end so, as plain text.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        skip_prefixes: Sequence[str] | None = (),
        skip_substrs: Sequence[str] | None = (),
        ignore_unexpected_prefixes: Sequence[str] | None = (),
        ignore_unexpected_suffixes: Sequence[str] | None = (),
    ) -> None:
        self.module = module
        self.skip_prefixes = tuple(skip_prefixes or ())
        self.skip_substrs = tuple(skip_substrs or ())
        self.ignore_unexpected_prefixes = tuple(ignore_unexpected_prefixes or ())
        self.ignore_unexpected_suffixes = tuple(ignore_unexpected_suffixes or ())
        self._ignored = IgnoredWeights(getattr(module, "ignored_weights", None) or ())
        self._loaded: set[str] = set()
        self._unplaced: list[Unplaced] = []
        self._members: dict[str, tuple[str, ...]] = {}  # of modules where something had no place
        self._parts: Packed = {}  # of the mapper's stacked rules, for hints
        self._gather = self._packs = False

    def load_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        mapper: WeightsMapper | None = None,
    ) -> set[str]:
        """Place every tensor; returns the names of the parameters and buffers that took one.

        Without stacked rules in ``mapper``, a class's ``packed_modules_mapping`` says which
        modules are parts of a fused one.

        Raises:
            WeightLoadError: UNEXPECTED_TENSOR, tensors without a place (unless a recorder takes
                them: then the walk goes on); else a weight loader failed: with tensor, parameter,
                shard, shapes, dtypes and ranks.
        """
        self._gather = isinstance(weights, Collection)
        self._packs = mapper is None or not mapper.stacks
        self._unplaced, self._parts, self._members = [], {}, {}
        offers = offers_of(weights)
        if mapper is not None:
            offers, self._parts = mapper.apply(offers), mapper.stacked_parts
        items = self._started(offers)
        first = next(items, None)
        if first is None:
            return set()
        # A lazy tensor holds no memory, so all of them may be held until their group is whole.
        self._gather = self._gather or isinstance(first[2], (LazyTensor, Offered))
        everything = itertools.chain([first], items)
        self._loaded = set()
        self._walk(self.module, 0, first[0].prefix, everything, first[0].packed)
        if self._unplaced:
            raise unplaced_error(self.module, self._unplaced)
        return self._loaded

    def _started(self, weights: Iterable[tuple[str, torch.Tensor | Offered]]) -> Iterator[Item]:
        """The tensors that are not skipped, under names that carry their way."""
        for text, tensor in weights:
            name = text if isinstance(text, ShardedName) else ShardedName(text)
            if self.skip_prefixes and any(_begins(name, prefix) for prefix in self.skip_prefixes):
                _skip(name, "its name begins with one of skip_prefixes")
            elif self.skip_substrs and any(part in name for part in self.skip_substrs):
                _skip(name, "its name contains one of skip_substrs")
            else:
                yield name, name.split("."), tensor

    def _walk(
        self,
        module: torch.nn.Module,
        depth: int,
        prefix: str,
        items: Iterable[Item],
        packed: Packed | None,
    ) -> None:
        """Place tensors below ``module``, ``depth`` components under ours.

        ``prefix`` is its path from the outermost module, with the dot.
        """
        if _own(module, "is_missing_layer"):
            why = getattr(module, "reason", None) or "its layer belongs to another pipeline stage"
            for name, _, _ in items:
                _skip(name, str(why))
            return
        if self._packs and (mapping := _own(module, "packed_modules_mapping")):
            packed = {**(packed or {}), **invert_packed(mapping)}
        for head, group in self._groups(items, depth):
            target: torch.Tensor | None = module._parameters.get(head)
            target = module._buffers.get(head) if target is None else target
            if (child := module._modules.get(head)) is not None:
                self._enter(child, depth + 1, f"{prefix}{head}.", group, packed)
            elif target is not None:
                self._leaf(module, depth, target, group)
            elif found := find_fused(module, head, packed):
                fused, shard_id, child = found
                moved = _renamed(group, depth, fused, shard_id)
                self._enter(child, depth + 1, f"{prefix}{fused}.", moved, packed)
            else:
                for item in group:
                    self._misplaced(module, depth, item, packed)

    def _groups(self, items: Iterable[Item], depth: int) -> Iterator[tuple[str, Iterable[Item]]]:
        """Tensors by one component of their names: all of each, or runs of neighbours."""
        if not self._gather:
            yield from itertools.groupby(items, key=lambda item: item[1][depth])
            return
        groups: defaultdict[str, list[Item]] = defaultdict(list)
        for item in items:
            groups[item[1][depth]].append(item)
        yield from groups.items()

    def _enter(
        self,
        child: torch.nn.Module,
        depth: int,
        prefix: str,
        group: Iterable[Item],
        packed: Packed | None,
    ) -> None:
        """Go on in a child, by its own ``load_weights`` if it has one."""
        inner = self._deeper(group, depth)
        if callable(skip := _own(child, "skip_weight")):
            inner = _held_here(inner, depth, skip)
        load = _own(child, "load_weights")
        if not callable(load) or _own(child, "is_missing_layer") or child is self.module:
            self._walk(child, depth, prefix, inner, packed)
            return
        named = _relative(inner, depth, prefix, packed)
        loaded = load(list(named) if self._gather else named)
        if loaded is None:
            log.debug("%s.load_weights does not say what it loaded", type(child).__name__)
        path = ".".join(prefix.split(".")[-1 - depth :])
        self._loaded.update(path + name for name in loaded or ())

    def _deeper(self, group: Iterable[Item], depth: int) -> Iterator[Item]:
        """The tensors whose names do not end at a module."""
        for item in group:
            if len(item[1]) > depth:
                yield item
                continue
            why = f"'{printable(item[0].path)}' is a module, not a parameter"
            self._unplaced_at(item[0], item[2], why)

    def _leaf(
        self, module: torch.nn.Module, depth: int, target: torch.Tensor, group: Iterable[Item]
    ) -> None:
        """Load tensors into one parameter or buffer."""
        for name, parts, tensor in group:
            if len(parts) > depth + 1:
                path = name.prefix + ".".join(parts[: depth + 1])
                why = f"'{printable(path)}' is a parameter and has no members"
                self._unplaced_at(name, tensor, why)
            elif parts[depth] in module._non_persistent_buffers_set and (
                reason := harmless_reason(name.checkpoint_name, tensor.shape)
            ):
                _skip(name, reason)
            elif self._load(name, tensor, target):
                self._loaded.add(str(name))

    def _load(self, name: ShardedName, offer: torch.Tensor | Offered, target: torch.Tensor) -> bool:
        """Run a weight loader on one tensor; False if a recorder took its failure."""
        loader = getattr(target, "weight_loader", default_weight_loader)
        shard = () if name.shard_id is None else (name.shard_id,)
        try:
            run_loader(loader, target, offer, *shard)
        except MemoryError:
            raise
        except Exception as cause:  # whatever a third party raises is wrapped once
            ranks = ranks_of(self.module, target)
            error = describe_failure(cause, name=name, param=target, loaded=offer, ranks=ranks)
            if isinstance(error, WeightLoadError) and report_misfit(
                "SHAPE",
                name=name.checkpoint_name,
                target=name.path,
                message=error.message,
                hint=error.hint,
            ):
                return False
            if error is cause:
                raise
            raise error from cause
        return True

    def _misplaced(
        self, module: torch.nn.Module, depth: int, item: Item, packed: Packed | None
    ) -> None:
        """A tensor whose component at ``depth`` is nothing in ``module``."""
        name, parts, tensor = item
        path = name.prefix + "".join(f"{part}." for part in parts[:depth])
        here = self._members.get(path)
        if here is None:
            here = self._members[path] = members_of(module, {**self._parts, **(packed or {})})
        why, near = why_unplaced(module, path, parts[depth:], here)
        self._unplaced_at(name, tensor, why, here, near)

    def _unplaced_at(
        self,
        name: ShardedName,
        tensor: torch.Tensor | Offered,
        why: str,
        available: Sequence[str] = (),
        near: Sequence[str] = (),
    ) -> None:
        """A tensor without a place: left out by a rule, else reported, else kept for the error."""
        if reason := self._excuse(name, tensor):
            _skip(name, reason)
            return
        message = f"tensor '{printable(name.checkpoint_name)}' has no place: {why}"
        hint = "nearest: " + ", ".join(f"'{printable(one)}'" for one in near) if near else None
        if report_misfit(
            "UNEXPECTED", name=name.checkpoint_name, target=name.path, message=message, hint=hint
        ):
            return
        self._unplaced.append(
            Unplaced(name, message, hint, tuple(available), tuple(near), file_of(tensor))
        )
        if not self._gather:
            raise unplaced_error(self.module, self._unplaced)

    def _excuse(self, name: ShardedName, tensor: torch.Tensor | Offered) -> str | None:
        """Why a tensor may be without a place, or None."""
        for text in (name.checkpoint_name, name.path):
            reason = self._ignored.reason(text, tensor.shape) or harmless_reason(text, tensor.shape)
            if reason:
                return reason
        if any(_begins(name, prefix) for prefix in self.ignore_unexpected_prefixes):
            return "it has no place, and begins with one of ignore_unexpected_prefixes"
        if name.endswith(self.ignore_unexpected_suffixes):
            return "it has no place, and ends with one of ignore_unexpected_suffixes"
        return None


def _begins(name: str, prefix: str) -> bool:
    """Whether whole leading components of ``name`` are ``prefix``."""
    prefix = prefix.removesuffix(".")
    return name.startswith(prefix) and name[len(prefix) :][:1] in ("", ".")


def _renamed(group: Iterable[Item], depth: int, fused: str, shard_id: Any) -> Iterator[Item]:
    """Tensors of a part, under the name of the fused module and with the shard id."""
    for name, parts, tensor in group:
        new = [*parts[:depth], fused, *parts[depth + 1 :]]
        yield ShardedName(".".join(new), shard_id, like=name), new, tensor


def _relative(
    items: Iterable[Item], depth: int, prefix: str, packed: Packed | None
) -> Iterator[tuple[ShardedName, torch.Tensor]]:
    """Tensors as a child's ``load_weights`` takes them: under names relative to it."""
    for name, parts, tensor in items:
        new = ShardedName(".".join(parts[depth:]), like=name)
        new.prefix, new.packed = prefix, packed
        yield new, _taken(tensor)


def _held_here(
    items: Iterable[Item], depth: int, skip: Callable[[str], str | None]
) -> Iterator[Item]:
    """The tensors that a module does not say are other ranks'; the others are listed."""
    for item in items:
        if reason := skip(".".join(item[1][depth:])):
            _skip(item[0], reason)
        else:
            yield item


def _taken(tensor: torch.Tensor | Offered) -> torch.Tensor:
    return tensor.tensor() if isinstance(tensor, Offered) else tensor


def _own(module: torch.nn.Module, name: str) -> Any:
    """An attribute of a module or its class, or None; ``nn.Module.__getattr__`` is not asked."""
    if name in module.__dict__ or hasattr(type(module), name):
        return getattr(module, name)
    return None


def _skip(name: ShardedName, reason: str) -> None:
    """Put a tensor that is left out on the list."""
    report_misfit("SKIPPED", name=name.checkpoint_name, target=name.path, message=reason)
    log.debug("tensor '%s' is left out: %s", printable(name.checkpoint_name), reason)
