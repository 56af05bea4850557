"""The checkpoint's names of a model's parameters: its mappers run backwards, module by module."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from loadkit.mapper import MappedName, WeightsMapper
from loadkit.packed_modules import invert_packed
from loadkit.reverse_mapper import ReverseMapper

__all__ = ["CheckpointNames"]

Named = list[tuple[str, Any]]


class CheckpointNames:
    """Parameter names to checkpoint names.

    A parameter passes the mapper of every module around it that loads by one, the innermost
    first: those are the modules with a ``hf_to_loadkit_mapper`` that are the outermost or have a
    ``load_weights``. Where a mapper has no stacked rules, the ``packed_modules_mapping`` of the
    classes on the way says which modules are fused. A module that loads its tensors by names of its
    own says them itself: ``checkpoint_names(parameter)`` gives (name, shard id) pairs, relative to
    the module; None: that parameter goes by its name.

    Args:
        model: the outermost module.
        mapper: its mapper; None: its class's.
        known: names that a checkpoint had, for what no rule can undo.
    """

    def __init__(
        self, model: nn.Module, mapper: WeightsMapper | None, known: Collection[str]
    ) -> None:
        self._model = model
        self._back: dict[str, ReverseMapper] = {}
        self._known: dict[MappedName, str] = {}
        for path, module in model.named_modules():
            own = getattr(type(module), "hf_to_loadkit_mapper", None)
            if not path:
                own = mapper or own
            elif not callable(getattr(module, "load_weights", None)):
                continue
            if isinstance(own, WeightsMapper):
                self._back[path] = own.reverse()
        outer = mapper or getattr(type(model), "hf_to_loadkit_mapper", None)
        self._outer = outer if isinstance(outer, WeightsMapper) else None
        if isinstance(outer, WeightsMapper):
            forward = ((outer.map_name(name), name) for name in sorted(known))
            self._known = {place: name for place, name in forward if place is not None}

    @property
    def has_rules(self) -> bool:
        """Whether the model says anything about names."""
        return bool(self._back) or any(
            getattr(type(module), "packed_modules_mapping", None)
            for module in self._model.modules()
        )

    def of(self, parameter: str) -> Named | None:
        """(checkpoint name, shard id) of a parameter, one per part of it; None: not to be undone.

        The shard id is None where the parameter is one tensor.
        """
        parts = parameter.split(".")
        own = self._own_names(parts)
        shards: list[Any] | None = None if own is None else [one for _, one in own]
        found: Named = [(parameter, None)] if own is None else own
        paths = [".".join(parts[:n]) for n in range(len(parts) - 1, -1, -1)]
        for path in paths:
            back = self._back.get(path)
            if back is None:
                continue
            start = len(path) + 1 if path else 0
            current = found[0][0]
            if shards is None and (ids := back.shards(current[start:])):
                # One tensor per shard, where the mapper accepts tensors fused on disk as well.
                ids = [one for one in ids if isinstance(one, (int, str))] or ids[:1]
                shards = ids
                named = [(self._undo(path, start, current, one), one) for one in ids]
            else:
                named = [(self._undo(path, start, name, None), one) for name, one in found]
            found = [(name, one) for name, one in named if name is not None]
            if len(found) < len(named):
                return None
        if shards is None and not (self._outer is not None and self._outer.stacks):
            return self._unpacked(found[0][0], parts)
        return found

    def _own_names(self, parts: list[str]) -> Named | None:
        """What the module of a parameter says that its tensors are called."""
        module: Any = self._model
        for component in parts[:-1]:
            module = module._modules[component]
        names = getattr(module, "checkpoint_names", None)
        own = names(parts[-1]) if callable(names) else None
        if own is None:
            return None
        return [(".".join([*parts[:-1], name]), shard_id) for name, shard_id in own]

    def _undo(self, path: str, start: int, name: str, shard_id: Any) -> str | None:
        """One mapper's step back on the part of a name that it sees.

        Where no rule leads from a name to itself, and so says which spelling is the one to save,
        the checkpoint's own counts.
        """
        inner = self._back[path].map_name(name[start:], shard_id)
        known = None if path else self._known.get(MappedName(name, shard_id))
        if known is not None and (inner is None or not self._is_settled(inner)):
            return known
        return None if inner is None else name[:start] + inner

    def _is_settled(self, name: str) -> bool:
        """Whether an outer rule leads from this name to itself."""
        steps = self._outer.explain(name).steps if self._outer is not None else ()
        return any(step.before == step.after for step in steps)

    def _unpacked(self, name: str, parts: list[str]) -> Named:
        """The parts of a fused module, by the ``packed_modules_mapping`` in force there."""
        packed: dict[str, list[tuple[str, Any]]] = {}
        module: Any = self._model
        for component in parts[:-1]:
            mapping = getattr(type(module), "packed_modules_mapping", None)
            if isinstance(mapping, dict):
                for part, targets in invert_packed(mapping).items():
                    for fused, shard_id in targets:
                        packed.setdefault(fused, []).append((part, shard_id))
            if found := packed.get(component):
                names = dict.fromkeys((part, shard_id) for part, shard_id in found)
                return [(_replaced(name, component, part), one) for part, one in names]
            module = module._modules.get(component)
            if not isinstance(module, nn.Module):
                break
        return [(name, None)]


def _replaced(name: str, component: str, part: str) -> str:
    """The name with the last of these components replaced."""
    parts = name.split(".")
    at = len(parts) - 1 - parts[::-1].index(component)
    return ".".join([*parts[:at], *part.split("."), *parts[at + 1 :]])
