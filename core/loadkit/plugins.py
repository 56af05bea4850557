"""Conversation with plugins: a guarded pluggy manager.

Every plugin is imported, registered and called by itself. What one raises is undone, recorded
and told once; the others, and the load, go on.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from loadkit.claims import HERE, Entry
from loadkit.entry_index import Row, index
from loadkit.errors import LoadkitError, PluginError
from loadkit.plugin_guard import (
    Failure,
    failures,
    forget_failures,
    guarded,
    load_row,
    report,
)

__all__ = ["Registry", "call", "entries", "failures", "load", "manager", "register", "reset"]

GROUP = "loadkit"

_lock = threading.RLock()
_manager: Any = None
_seen: set[Row] = set()
_loading = False


class Registry:
    """The five tables through one object, as ``loadkit_register`` gets it."""

    def register_loader(self, name: str, value: object, *, override: bool = False) -> None:
        """Register a ``BaseModelLoader``, or its ``"module:Class"``, for a load format."""
        self._register("loaders", name, value, override)

    def register_model(self, architecture: str, value: object, *, override: bool = False) -> None:
        """Register a model class, or its ``"module:Class"``, for an architecture."""
        self._register("models", architecture, value, override)

    def register_quantization(self, name: str, value: object, *, override: bool = False) -> None:
        """Register a ``QuantizationConfig``, or its ``"module:Class"``, for a method."""
        self._register("quantization", name, value, override)

    def register_source(self, scheme: str, value: object, *, override: bool = False) -> None:
        """Register a ``Source``, or its ``"module:Class"``, for a URI scheme."""
        self._register("sources", scheme, value, override)

    def register_reader(self, name: str, value: object, *, override: bool = False) -> None:
        """Register a ``Reader``, or its ``"module:Class"``."""
        self._register("readers", name, value, override)

    def _register(self, kind: str, name: str, value: object, override: bool) -> None:
        from loadkit.tables import TABLES

        TABLES[kind].register(name, value, override=override)


def manager() -> Any:
    """The pluggy manager, with the specs and the historic call in it, and no plugin loaded."""
    global _manager
    with _lock:
        if _manager is None:
            import pluggy

            from loadkit import hookspecs

            _manager = pluggy.PluginManager("loadkit")
            _manager.add_hookspecs(hookspecs)
            _manager.hook.loadkit_register.call_historic(kwargs={"registry": Registry()})
        return _manager


def load() -> None:
    """Import every installed hook plugin that is not loaded yet, each by itself.

    Raises:
        PluginError: one is broken, and LOADKIT_STRICT_PLUGINS is set.
    """
    global _loading
    with _lock:
        if _loading:  # a plugin looks something up while it is loaded
            return
        _loading = True
        try:
            for row in index().rows:
                wanted = row.group == GROUP and row.state == "ready"
                if (wanted or row.state == "broken") and row not in _seen:
                    _seen.add(row)
                    _load(row)  # a broken row of any group is told of here
        finally:
            _loading = False


def _load(row: Row) -> None:
    try:
        register(load_row(row), row=row)
    except PluginError as error:
        report(error, row)


def register(plugin: object, name: str | None = None, *, row: Row | None = None) -> None:
    """Add a plugin: a module or an object with functions marked ``hookimpl``.

    Raises:
        PluginError: a marked function has no spec, takes what the spec does not give, or
            registering failed; names the plugin and its distribution.
    """
    shown = name or getattr(plugin, "__name__", type(plugin).__name__)
    row = row or Row(GROUP, str(shown), str(shown), HERE, "")
    pm = manager()

    def add() -> None:
        proxy = _proxy(plugin, row)
        try:
            pm.register(proxy, name=f"{row.distribution}:{row.name}")
            pm.check_pending()
        except BaseException:
            if pm.is_registered(proxy):
                pm.unregister(proxy)
            raise
        failed = proxy.failed
        if failed is not None:
            pm.unregister(proxy)
            raise failed

    guarded(row, add, "registering it")


class _Proxy(SimpleNamespace):
    """What pluggy holds in a plugin's place: its hooks, guarded."""

    failed: BaseException | None = None


def _proxy(plugin: object, row: Row) -> _Proxy:
    hooks: dict[str, Any] = {}
    for name in dir(plugin):
        function = inspect.getattr_static(plugin, name)
        options = getattr(getattr(plugin, name, None), "loadkit_impl", None)
        if name.startswith("_") or not isinstance(options, dict) or not callable(function):
            continue
        hooks[name] = _Guarded(getattr(plugin, name), row, options).function
    proxy = _Proxy(**hooks)
    register_hook = hooks.get("loadkit_register")
    if register_hook is not None:
        proxy.loadkit_register = _keep_failure(register_hook, proxy)
    return proxy


class _Guarded:
    """One hook of one plugin, called so that its failure stays its own."""

    def __init__(self, call: Callable[..., Any], row: Row, options: dict[str, Any]) -> None:
        self.row = row
        wrapper = options.get("wrapper") or options.get("hookwrapper")
        self.function = call if wrapper else self._wrap(call, options)

    def _wrap(self, call: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
        name = call.__name__
        answers = name.startswith(("loadkit_detect", "loadkit_resolve"))

        @functools.wraps(call)
        def function(*args: Any, **kwargs: Any) -> Any:
            if name == "loadkit_register":
                return call(*args, **kwargs)
            try:
                return guarded(self.row, lambda: call(*args, **kwargs), f"its hook {name}")
            except PluginError as error:
                if answers and isinstance(error.__cause__, LoadkitError):
                    raise error.__cause__ from None  # said on purpose: part of the conversation
                report(error, self.row)
                return None

        function.loadkit_impl = options  # type: ignore[attr-defined]
        return function


def _keep_failure(call: Callable[..., Any], proxy: _Proxy) -> Callable[..., Any]:
    """``loadkit_register``, whose failure must not stop pluggy's historic call half-way."""

    @functools.wraps(call)
    def function(*args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again by ``register``
            proxy.failed = error

    return function


def call(hook: str, /, **values: Any) -> Any:
    """Call a hook of all plugins, loading them first.

    Args:
        hook: its name without the prefix: ``plan_ready``.
        values: what the spec says it gets.

    Returns:
        The first answer that is not None (None without one) where the spec says firstresult,
        else the list of answers.
    """
    load()
    return getattr(manager().hook, f"loadkit_{hook}")(**values)


def entries() -> list[tuple[str, Entry]]:
    """Everything plugged in, broken things too, as (kind, entry). Imports nothing."""
    from loadkit.tables import TABLES

    found = [
        (kind, entry)
        for kind, table in TABLES.items()
        for entry in table.entries()
        if entry.state != "not installed"
    ]
    for row in index().of_group(GROUP):
        failed: Failure | None = next((each for each in failures() if each.row == row), None)
        state, problem = row.state, row.problem
        if failed is not None and state == "ready":
            state, problem = "broken", f"{type(failed.error).__name__}: {failed.error}"
        entry = Entry(row.name, row.value, row.distribution, row.version, state, problem)
        found.append(("plugins", entry))
    return found


def reset() -> None:
    """Forget plugins and failures, so that the next use finds them anew. For tests."""
    global _manager
    from loadkit.tables import TABLES

    with _lock:
        _manager = None
        _seen.clear()
        forget_failures()
        for table in TABLES.values():
            table.forget_contests()
