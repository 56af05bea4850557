"""``ModelRegistry``: from an architecture's name in config.json to a class.

The model tables are the union of what is installed and what this process registered. Only the
class that is asked for is imported, and listing or testing for names imports nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from loadkit.architecture_names import (
    ALIASES,
    ONCE_SUPPORTED,
    TABLE_NAMES,
    family_of,
    split_task,
    table_of,
)
from loadkit.config_lookup import stated_architectures
from loadkit.entry_index import Row
from loadkit.errors import (
    ArchitectureError,
    ArchitectureImportError,
    LoadkitError,
    NotInstalledError,
    PluginError,
    UnknownNameError,
)
from loadkit.hf_config import HFConfig
from loadkit.known_names import pip_line
from loadkit.model_inspection import INSPECT_TIMEOUT, ModelInfo, inspect_class, inspect_path
from loadkit.name_table import NameTable, RegistrationWarning
from loadkit.plugin_guard import guarded, import_value
from loadkit.tables import models
from loadkit.text import printable

if TYPE_CHECKING:
    from torch import nn

    from loadkit.config import ModelConfig

__all__ = [
    "ModelInfo",
    "ModelRegistry",
    "RegistrationWarning",
    "architectures_of",
    "is_supported",
]

Adapter = Callable[[Any], Any]


class _ModelRegistry:
    """Architectures and their classes; ``ModelRegistry`` is the one instance.

    Args:
        table: the table of names.
    """

    def __init__(self, table: NameTable) -> None:
        self._table = table
        # task -> what makes a class for it out of the family's ForCausalLM class
        self._adapters: dict[str, Adapter | str] = {}

    def __reduce__(self) -> str:
        return "ModelRegistry"  # another process finds its own

    def register_model(
        self, model_arch: str, model_cls: type[nn.Module] | str, *, override: bool = False
    ) -> None:
        """Give an architecture to a class, or to the class at ``"module:Class"``.

        The string form is imported only when it is asked for, and travels to other processes
        (``export_registrations``).

        Raises:
            OptionError: no usable name or value.
            ConflictError: another class has the name; ``override`` wins.
        """
        self._table.register(model_arch, model_cls, override=override)

    def register_adapter(self, task: str, adapter: Adapter | str) -> None:
        """Serve ``<Family><task>`` by an adapted ``<Family>ForCausalLM`` where no class has it.

        Args:
            task: the end of an architecture's name: ``ForSequenceClassification``.
            adapter: class -> class, or its ``"module:function"``.
        """
        self._adapters[task] = adapter

    def get_supported_archs(self) -> list[str]:
        """Every architecture of the tables, sorted. Imports nothing."""
        return self._table.names()

    def tables(self) -> dict[str, list[str]]:
        """The architectures by table, in the order of the model lists. Imports nothing."""
        found: dict[str, list[str]] = {name: [] for name in TABLE_NAMES}
        for architecture in self._table.names():
            found[table_of(architecture)].append(architecture)
        return found

    def resolve_model_cls(
        self, architectures: str | Iterable[str], model_config: ModelConfig | None = None
    ) -> tuple[type[nn.Module], str]:
        """The class of the first architecture that has one, and that architecture.

        Args:
            architectures: names, in the order of the config.
            model_config: its ``model_impl`` decides whether tables or plugins are asked.

        Raises:
            ArchitectureError: none is known (names the nearest), or it was supported once.
            ArchitectureImportError: it is registered, and importing it failed (chained).
            NotInstalledError: it is known, and its distribution is missing.
            ConflictError: two distributions claim it.
        """
        names = _as_names(architectures)
        impl = getattr(model_config, "model_impl", "auto")
        if impl != "transformers":
            for name in names:
                known = self._normalize(name)
                if known is not None:
                    return self._load(known), name
                adapted = self._adapted(name)
                if adapted is not None:
                    return adapted, name
        if impl != "loadkit":
            for name in names:
                cls = self._ask_plugins(name, model_config)
                if cls is not None:
                    return cls, name
        raise self._unsupported(names, impl, getattr(model_config, "hf_config", None))

    def inspect_model_cls(
        self,
        architectures: str | Iterable[str],
        model_config: ModelConfig | None = None,
        *,
        timeout: float = INSPECT_TIMEOUT,
    ) -> tuple[ModelInfo, str]:
        """What the class that would be resolved can do, without importing it in this process.

        Raises:
            ArchitectureImportError: E_INSPECT, the import failed, hung or ended its process.
            LoadkitError: as ``resolve_model_cls``.
        """
        names = _as_names(architectures)
        for name in names:
            known = self._normalize(name)
            if known is None:
                continue
            path = self._table.where(known)
            if isinstance(path, Row):
                info = inspect_path(
                    name, path.value, distribution=path.distribution, timeout=timeout
                )
            elif isinstance(path, str):
                info = inspect_path(name, path, timeout=timeout)
            else:
                info = inspect_class(name, path)
            return info, name
        cls, name = self.resolve_model_cls(names, model_config)
        return inspect_class(name, cls), name

    def export_registrations(self) -> dict[str, str]:
        """This process's registrations for processes it starts: architecture -> module:Class.

        Classes that another process cannot import (of ``__main__``, or inside a function) are
        left out.
        """
        return self._table.exportable()

    def import_registrations(self, exported: Mapping[str, str]) -> None:
        """Repeat another process's registrations."""
        for architecture, path in exported.items():
            self._table.register(architecture, path, override=True)

    # -- inside ----------------------------------------------------------------------------------

    def _normalize(self, name: str) -> str | None:
        """The table's spelling of a name, or None; plugins' registrations count."""
        for spelling in (name, ALIASES.get(name)):
            if spelling is not None and self._table.has(spelling):
                return spelling
        return None

    def _load(self, name: str) -> type[nn.Module]:
        try:
            found: Any = self._table.lookup(name)
        except PluginError as error:
            cause = error.__cause__
            raise ArchitectureImportError(
                f"architecture {name!r} is registered, but importing it failed: {error.message}",
                detail=error.detail,
            ) from (cause or error)
        cls: type[nn.Module] = found
        return cls

    def _adapted(self, name: str) -> type[nn.Module] | None:
        """A class made from the family's text generation class by the task's adapter, or None."""
        family, task = split_task(name)
        base = f"{family}ForCausalLM"
        adapter: Any = self._adapters.get(task)
        if adapter is None or not self._table.has(base):
            return None
        if isinstance(adapter, str):
            adapter = import_value(adapter)
        made: type[nn.Module] = adapter(self._load(base))
        return made

    def _ask_plugins(self, name: str, model_config: ModelConfig | None) -> type[nn.Module] | None:
        """The class a plugin's hook names for an architecture of no table, or None."""
        from loadkit import plugins

        answer = plugins.call("resolve_architecture", architecture=name, model_config=model_config)
        if answer is None:
            return None
        if not isinstance(answer, str):
            cls: type[nn.Module] = answer
            return cls
        row = Row(plugins.GROUP, name, answer, "the plugin that resolved it", "")
        try:
            found: type[nn.Module] = guarded(row, lambda: import_value(answer), "importing it")
        except PluginError as error:
            raise ArchitectureImportError(
                f"architecture {printable(name)!r} is resolved by a plugin, but importing it "
                f"failed: {error.message}",
                detail=error.detail,
            ) from (error.__cause__ or error)
        return found

    def _unsupported(self, names: tuple[str, ...], impl: str, config: Any) -> LoadkitError:
        """The error for architectures that nobody has."""
        shown = ", ".join(f"'{printable(name, 100)}'" for name in names)
        if impl == "transformers":
            return NotInstalledError(
                f"model_impl='transformers' needs the transformers shim for {shown}",
                detail={"asked": list(names), "extra": "transformers"},
                hint=pip_line("transformers"),
            )
        for name in names:
            if name in ONCE_SUPPORTED:
                last = ONCE_SUPPORTED[name]
                return ArchitectureError(
                    f"architecture '{name}' was supported until loadkit {last}",
                    detail={"asked": list(names), "state": "once supported", "last": last},
                    hint=f"install loadkit {last}",
                )
        problems = [self._table.missing(name) for name in names]
        for problem in problems:
            if not isinstance(problem, UnknownNameError):
                return problem
        first = problems[0]
        detail = {**(first.detail or {}), "asked": list(names), "state": "unknown"}
        family = [known for known in self._table.names() if family_of(known) == family_of(names[0])]
        related = f"its family has {', '.join(family[:5])}" if family else None
        if isinstance(config, HFConfig) and config.get("auto_map"):
            told = "its config names code of the checkpoint (auto_map), which loadkit never runs"
            related = f"{told}; {related}" if related else told
        return ArchitectureError(
            f"architecture {shown} is not known: {first.message}",
            detail={**detail, "family": family},
            hint=related or pip_line("transformers") + " runs any that transformers has",
        )


def _as_names(architectures: str | Iterable[str]) -> tuple[str, ...]:
    given: Any = architectures
    names: tuple[Any, ...] = (given,) if isinstance(given, str) else tuple(given or ())
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArchitectureError(
            f"no architecture was given: {printable(repr(architectures), 100)}",
            hint="name it: architecture='...'",
        )
    return names


ModelRegistry = _ModelRegistry(models)


def architectures_of(model_type: str) -> list[str]:
    """The installed architectures of a config's ``model_type``, sorted. Imports nothing."""
    wanted = "".join(char for char in model_type.lower() if char.isalnum())
    return [name for name in models.names() if family_of(name) == wanted]


def is_supported(config: object) -> bool:
    """Whether some architecture of a config has a class; never raises, imports nothing.

    Args:
        config: a ``ModelConfig``, an ``HFConfig``, a mapping as in config.json, or anything else
            (which is not supported).
    """
    asked = getattr(config, "architecture", None)
    inner = getattr(config, "hf_config", config)
    if isinstance(asked, str) and asked and inner is not config:
        names: tuple[str, ...] = (asked,)
    elif isinstance(inner, (HFConfig, Mapping)):
        names = stated_architectures(inner)
    else:
        return False
    try:
        installed = set(models.names())
    except LoadkitError:
        return False
    return any(name in installed or ALIASES.get(name) in installed for name in names)
