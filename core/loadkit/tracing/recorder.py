"""Sees every operation of the loading threads, from construction to the end of ``load_weights``.

On bare meta tensors ``fill_`` and copies between parameters vanish in silence, so the recorder's
modes must be active in every thread that loads: threads started while it records get them too, and
a write of a lazy tensor from any other thread is an error. One recording at a time per process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadkit.errors import TraceError
from loadkit.tracing.evaluate import Fetch
from loadkit.tracing.given import Given
from loadkit.tracing.lazies import contiguous_like, meta_like, to_meta, view_of
from loadkit.tracing.lazy_tensor import LazyTensor, Offered, leaf_file
from loadkit.tracing.misfit import set_sink
from loadkit.tracing.modes import DispatchMode, FunctionMode
from loadkit.tracing.observed import Observed
from loadkit.tracing.reading import DataRead, fetch_from_files, settled, storage_of_plain
from loadkit.tracing.schema import fill_of, map_all
from loadkit.tracing.storage import Fill, Storage, Unwritten, Write
from loadkit.tracing.threads import new_threads_join
from loadkit.tracing.writes import record

__all__ = ["Misfit", "Recorder", "active_recorder"]

Phase = Literal["init", "load"]

_SMALL = 1 << 16  # elements of a constructor's fill that is remembered

_one_at_a_time = threading.RLock()
_active: Recorder | None = None


@dataclass(frozen=True, slots=True)
class Misfit:
    """A tensor that loader code could not place. ``kind``: UNEXPECTED, SHAPE or SKIPPED."""

    kind: str
    name: str
    target: str | None
    message: str
    hint: str | None


def active_recorder() -> Recorder | None:
    """The recording this thread belongs to, or None."""
    recorder = _active
    return recorder if recorder is not None and recorder.covers_this_thread() else None


class Recorder:
    """One recording: ``with Recorder(fetch) as r: build; r.phase = "load"; load_weights``.

    Attributes:
        phase: "init" while a model is constructed (its writes cover nothing), then "load".
        current: the checkpoint tensor being loaded.
        misfits: what loader code reported.
        data_reads: what loader code read while traced.
    """

    def __init__(self, fetch: Fetch | None = None) -> None:
        self.fetch = fetch or fetch_from_files
        self.phase: Phase = "init"
        self.current: str | None = None
        self.misfits: list[Misfit] = []
        self.data_reads: list[DataRead] = []
        self.yielded: list[str] = []
        self.not_asked: list[str] = []
        self.makes_real_data = False  # the loader's weights come real, from nowhere known
        self._sources: list[Iterator[tuple[str, Any]]] = []
        self.files: dict[str, str] = {}  # tensor -> its file's name
        self.given: dict[str, Given] = {}  # by the names that the model's load_weights got
        self.refused: frozenset[str] = frozenset()
        self.opaque: frozenset[str] = frozenset()
        self.opaque_bytes: dict[str, int] = {}
        self.real_of: Callable[[LazyTensor], torch.Tensor] | None = None
        self.lock = threading.RLock()
        self.known_copies: dict[Hashable, Any] = {}  # of tracing.known_copies
        self._storages: dict[int, Storage] = {}
        self._fills: dict[int, tuple[Any, Fill]] = {}  # small, made by zeros, ones, full
        self.live: set[int] = set()  # ids of the storages of a module that was there before
        self.real_scratch = False  # buffers made while loading are real
        self.foreign_writes = 0  # writes of lazy tensors in threads that are not recorded
        self._real_names: dict[int, tuple[StorageWeakRef, str]] = {}
        self._homes: list[Any] = []
        self._rehomed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._threads: set[int] = set()
        self._stack = ExitStack()

    # ------------------------------------------------------------ scope

    def __enter__(self) -> Self:
        global _active
        _one_at_a_time.acquire()
        self._stack.callback(_one_at_a_time.release)
        if _active is not None:
            self._stack.close()
            raise TraceError("a recording is already under way in this thread")
        _active = self
        self._stack.callback(_deactivate)
        old_sink = set_sink(self._take_misfit)
        self._stack.callback(set_sink, old_sink)
        self._stack.enter_context(self.in_this_thread())
        self._stack.enter_context(new_threads_join(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_active(self) -> bool:
        """Whether this recording is under way."""
        return _active is self

    def covers_this_thread(self) -> bool:
        """Whether this thread's operations are being recorded."""
        return threading.get_ident() in self._threads

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        """Record this thread's operations too."""
        me = threading.get_ident()
        if me in self._threads:
            yield
            return
        self._threads.add(me)
        try:
            with FunctionMode(self), DispatchMode(self):
                yield
        finally:
            self._threads.discard(me)

    def watching(self) -> TorchDispatchMode:
        """See the calls of code that itself runs inside of a recorded call."""
        return DispatchMode(self)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Real work of this thread in between (another model is built): nothing is recorded."""
        me = threading.get_ident()
        recorded = me in self._threads
        self._threads.discard(me)
        try:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                yield
        finally:
            if recorded:
                self._threads.add(me)

    # ------------------------------------------------------------ what is recorded

    def begin_load(self) -> None:
        """Construction is over: what it wrote can be read, and covers nothing."""
        self.phase = "load"
        self._fills.clear()
        for key, storage in list(self._storages.items()):
            if storage.real is not None and storage.writes:
                self._storages[key] = settled(storage)
            else:
                storage.loaded_from = len(storage.writes)

    def track_live(self, tensors: Iterable[torch.Tensor]) -> None:
        """Parameters and buffers that were there before: what is written to them is recorded."""
        for tensor in tensors:
            self.live.add(id(self.track(tensor)))

    def home_of(self, value: torch.Tensor) -> torch.Tensor:
        """A plain tensor on meta that is another name of a value's own recorded memory."""
        home = meta_like(value)
        kept = home.untyped_storage()
        self._homes.append(kept)
        self._storages[kept._cdata] = (
            value.lazy_storage if isinstance(value, LazyTensor) else self.track(value)
        )
        return home

    def undo_rehoming(self) -> None:
        """Give parameters whose ``.data`` was assigned their memory back (the load failed)."""
        while self._rehomed:
            target, old = self._rehomed.pop()
            torch.utils.swap_tensors(target, old)

    def storages(self) -> list[Storage]:
        """Every plain storage that was recorded, in order of first use."""
        return list(dict.fromkeys(self._storages.values()))

    def source_of(self, tensor: torch.Tensor) -> str | None:
        """The checkpoint tensor that real data came from, as far as is known."""
        found = self._real_names.get(tensor.untyped_storage()._cdata)
        if found is not None:
            return found[1]
        return self.current if self.takes_real and self.current in self.opaque_bytes else None

    @property
    def takes_real(self) -> bool:
        """Whether the tensor being loaded came as real data: what is made from it is real too."""
        if self.real_scratch:
            return True
        return self.current is not None and self.current in self.opaque_bytes

    def note_initial(self, param: torch.Tensor, data: torch.Tensor) -> None:
        """``data`` on meta takes the place of ``param``'s memory; a small fill is remembered."""
        fill = self._fills.pop(param.untyped_storage()._cdata, None)
        if fill is not None:
            record(data, fill[1], self)

    def note_fill(self, data: torch.Tensor, value: float) -> None:
        """Fresh memory on meta stands for memory that is filled with one number."""
        with torch._C.DisableTorchFunction():
            write = Write(view_of(data), data.dtype, Fill(value, data.dtype))
            self.track(data).writes.append(write)

    def track(self, tensor: torch.Tensor) -> Storage:
        """The recorded storage behind a plain tensor; held, so that its id stays its own."""
        key = tensor.untyped_storage()._cdata
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = storage_of_plain(tensor)
        return storage

    def tracked(self, tensor: torch.Tensor) -> Storage | None:
        """The recorded storage behind a plain tensor, if there is one."""
        if tensor.layout is not torch.strided:
            return None  # sparse and its like: real data, never recorded
        return self._storages.get(tensor.untyped_storage()._cdata)

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether recorded writes changed what this plain tensor holds."""
        storage = self.tracked(tensor)
        if storage is None:
            return False
        if storage.writes or storage.scratch:
            return True
        return tensor.device.type == "meta" and not isinstance(storage.base, Unwritten)

    def observe(
        self,
        weights: Iterable[tuple[str, Any]],
        *,
        then: Callable[[Iterator[tuple[str, Any]]], Iterator[tuple[str, Any]]] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass weights on, noting which one is being loaded; what is observed already stays so.

        They may be ``Offered``: whoever takes them gets tensors, unless it asks ``offers_of``.

        Names in ``refused`` are left out; those in ``opaque`` come as real data (``real_of``), and
        real tensors are opaque constants. ``then`` renames and changes them after they were seen,
        so that they are known by the checkpoint's own names.
        """
        if then is None and isinstance(weights, Observed):
            return weights
        if isinstance(weights, Observed):
            source = weights.offers
        else:
            source = iter(weights)
            self._sources.append(source)
        observed = self._observe(source)
        return Observed(observed if then is None else then(observed))

    def _pulled(self, source: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The weights; a loader that makes real data does its own work unrecorded."""
        if not self.makes_real_data:
            for weight in source:  # noqa: UP028 - "yield from" would close it with this generator
                yield weight
            return
        while True:
            with self.paused():
                item = next(source, None)
            if item is None:
                return
            yield item

    def drain(self) -> None:
        """Note the tensors that loader code never asked for."""
        for source in self._sources if not self.opaque_bytes else ():
            self.not_asked += [name for name, _ in source]
        self._sources.clear()

    def _observe(self, weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for name, tensor in self._pulled(iter(weights)):
            self.yielded.append(name)
            file = leaf_file(tensor)
            if file is not None:
                self.files[name] = file
            if name in self.refused:
                continue
            self.current = name
            if name in self.opaque and self.real_of:
                tensor = tensor.tensor() if isinstance(tensor, Offered) else tensor
                if isinstance(tensor, LazyTensor):
                    tensor = self.real_of(tensor)
            if not isinstance(tensor, (LazyTensor, Offered)):
                self._note_real(name, tensor)
            yield name, tensor
        self.current = None

    def note_source(self, tensor: torch.Tensor, name: str) -> None:
        """Real data came from that checkpoint tensor."""
        if tensor.layout is not torch.strided:
            return
        kept = tensor.untyped_storage()
        self._real_names[kept._cdata] = StorageWeakRef(kept), name  # the id is not used again

    def _note_real(self, name: str, tensor: torch.Tensor) -> None:
        self.note_source(tensor, name)
        self.opaque_bytes[name] = tensor.numel() * tensor.dtype.itemsize

    def _take_misfit(
        self,
        kind: str,
        *,
        name: str,
        target: str | None = None,
        message: str,
        hint: str | None = None,
    ) -> None:
        with self.lock:
            self.misfits.append(Misfit(kind, name, target, message, hint))

    def make_initial(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A buffer made while constructing: real; what a small one is filled with is noted."""
        made = func(*args, **kwargs)
        number = fill_of(func, args, kwargs)
        if number is not None and made.device.type != "meta" and made.numel() <= _SMALL:
            kept = made.untyped_storage()
            self._fills[kept._cdata] = kept, Fill(number, made.dtype)
        return made

    def forget_fill(self, tensor: torch.Tensor) -> None:
        """A buffer was written to: it is no plain fill any more."""
        if not isinstance(tensor, LazyTensor):
            self._fills.pop(tensor.untyped_storage()._cdata, None)

    def make_scratch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A buffer made while loading: lazy, so that no later read of it can miss a write."""
        meta = func(*map_all(args, to_meta), **{**kwargs, "device": "meta"})
        number = fill_of(func, args, kwargs)
        base: Fill | Unwritten = (
            Unwritten("a scratch buffer") if number is None else Fill(number, meta.dtype)
        )
        device = kwargs.get("device")
        likely = args[0] if args and isinstance(args[0], torch.Tensor) else None
        on_meta = (device is not None and torch.device(device).type == "meta") or (
            device is None
            and likely is not None
            and not isinstance(likely, LazyTensor)
            and likely.device.type == "meta"
        )
        if self.takes_real and not on_meta and not isinstance(likely, LazyTensor):
            return func(*args, **kwargs)
        view = contiguous_like(meta)
        numel = view.span()[1] // view.itemsize
        storage = Storage(base, numel, meta.dtype.itemsize, scratch=not isinstance(base, Unwritten))
        if on_meta:
            storage.keep = meta.untyped_storage()
            self._storages[storage.keep._cdata] = storage
            return meta
        return LazyTensor(storage, view, meta.dtype)


def _deactivate() -> None:
    global _active
    _active = None
