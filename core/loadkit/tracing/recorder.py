"""Sees every operation of the loading threads, from construction to the end of ``load_weights``.

On bare meta tensors ``fill_`` and copies between parameters vanish in silence, so the recorder's
modes must be active in every thread that loads: threads started while it records get them too, and
a write of a lazy tensor from any other thread is an error. One recording at a time per process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from loadkit.errors import TraceError
from loadkit.tracing import operations
from loadkit.tracing.evaluate import Fetch, evaluate, generate
from loadkit.tracing.lazy_tensor import LazyTensor, leaf_file, leaf_names
from loadkit.tracing.misfit import set_sink
from loadkit.tracing.program import Src, resolve, sources_of
from loadkit.tracing.storage import (
    PARAMETER,
    Constant,
    Fill,
    Storage,
    Unwritten,
    Value,
)
from loadkit.tracing.view import View

__all__ = ["DataRead", "Misfit", "Recorder", "active_recorder", "fetch_from_files"]

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


@dataclass(frozen=True, slots=True)
class DataRead:
    """Numbers that loader code asked for while it was traced: from which tensor, how many bytes."""

    tensor: str
    nbytes: int


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
        self._sources: list[Iterator[tuple[str, torch.Tensor]]] = []
        self.files: dict[str, str] = {}  # tensor -> its file's name
        self.refused: frozenset[str] = frozenset()
        self.opaque: frozenset[str] = frozenset()
        self.opaque_bytes: dict[str, int] = {}
        self.real_of: Callable[[LazyTensor], torch.Tensor] | None = None
        self.lock = threading.RLock()
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
        self._stack.enter_context(self._new_threads_join())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

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
            with _FunctionMode(self), _DispatchMode(self):
                yield
        finally:
            self._threads.discard(me)

    def watching(self) -> TorchDispatchMode:
        """See the calls of code that itself runs inside of a recorded call."""
        return _DispatchMode(self)

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

    @contextmanager
    def _new_threads_join(self) -> Iterator[None]:
        original = threading.Thread.start
        recorder = self

        def start(thread: threading.Thread) -> None:
            if recorder.covers_this_thread():
                run = thread.run

                def recorded_run() -> None:
                    with recorder.in_this_thread():
                        run()

                thread.run = recorded_run  # type: ignore[method-assign]
            original(thread)

        plain_submit = ThreadPoolExecutor.submit

        def submit(pool: ThreadPoolExecutor, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            if not recorder.covers_this_thread():
                return plain_submit(pool, fn, *args, **kwargs)

            def recorded_task() -> Any:
                with recorder.in_this_thread():
                    return fn(*args, **kwargs)

            return plain_submit(pool, recorded_task)

        threading.Thread.start = start  # type: ignore[method-assign,assignment]
        ThreadPoolExecutor.submit = submit  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            threading.Thread.start = original  # type: ignore[method-assign]
            ThreadPoolExecutor.submit = plain_submit  # type: ignore[method-assign]

    # ------------------------------------------------------------ what is recorded

    def begin_load(self) -> None:
        """Construction is over: what it wrote can be read, and covers nothing."""
        self.phase = "load"
        self._fills.clear()
        for key, storage in list(self._storages.items()):
            if storage.real is not None and storage.writes:
                self._storages[key] = _settled(storage)
            else:
                storage.loaded_from = len(storage.writes)

    def track_live(self, tensors: Iterable[torch.Tensor]) -> None:
        """Parameters and buffers that were there before: what is written to them is recorded."""
        for tensor in tensors:
            self.live.add(id(self.track(tensor)))

    def home_of(self, value: torch.Tensor) -> torch.Tensor:
        """A plain tensor on meta that is another name of a value's own recorded memory."""
        home = operations.meta_like(value)
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
            operations.record(data, fill[1], self)

    def track(self, tensor: torch.Tensor) -> Storage:
        """The recorded storage behind a plain tensor; held, so that its id stays its own."""
        key = tensor.untyped_storage()._cdata
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = storage_of_plain(tensor)
        return storage

    def tracked(self, tensor: torch.Tensor) -> Storage | None:
        """The recorded storage behind a plain tensor, if there is one."""
        return self._storages.get(tensor.untyped_storage()._cdata)

    def is_changed(self, tensor: torch.Tensor) -> bool:
        """Whether recorded writes changed what this plain tensor holds."""
        storage = self._storages.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return False
        if storage.writes or storage.scratch:
            return True
        return tensor.device.type == "meta" and not isinstance(storage.base, Unwritten)

    def observe(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        then: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterator[tuple[str, torch.Tensor]]]
        | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass weights on, noting which one is being loaded; what is observed already stays so.

        Names in ``refused`` are left out; those in ``opaque`` come as real data (``real_of``), and
        real tensors are opaque constants. ``then`` renames and changes them after they were seen,
        so that they are known by the checkpoint's own names.
        """
        if then is None and isinstance(weights, _Observed):
            return weights
        source = iter(weights)
        if not isinstance(weights, _Observed):
            self._sources.append(source)
        observed = self._observe(source)
        return _Observed(observed if then is None else then(observed))

    def drain(self) -> None:
        """Note the tensors that loader code never asked for."""
        for source in self._sources if not self.opaque_bytes else ():
            self.not_asked += [name for name, _ in source]
        self._sources.clear()

    def _observe(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            self.yielded.append(name)
            file = leaf_file(tensor)
            if file is not None:
                self.files[name] = file
            if name in self.refused:
                continue
            self.current = name
            if isinstance(tensor, LazyTensor) and name in self.opaque and self.real_of:
                tensor = self.real_of(tensor)
            if not isinstance(tensor, LazyTensor):
                self._note_real(name, tensor)
            yield name, tensor
        self.current = None

    def note_source(self, tensor: torch.Tensor, name: str) -> None:
        """Real data came from that checkpoint tensor."""
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
        number = _fill_of(func, args, kwargs)
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
        meta = func(*operations._map_all(args, operations._to_meta), **{**kwargs, "device": "meta"})
        number = _fill_of(func, args, kwargs)
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
        view = operations.contiguous_like(meta)
        numel = view.span()[1] // view.itemsize
        storage = Storage(base, numel, meta.dtype.itemsize, scratch=not isinstance(base, Unwritten))
        if on_meta:
            storage.keep = meta.untyped_storage()
            self._storages[storage.keep._cdata] = storage
            return meta
        return LazyTensor(storage, view, meta.dtype)


class _Observed(Iterator[tuple[str, torch.Tensor]]):
    """Weights on their way through ``Recorder.observe``."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._weights = weights

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._weights)


def _fill_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number that a factory fills its result with; None: it leaves it as it is."""
    fill = operations.FACTORIES[func]
    if fill == "zero":
        return 0
    if fill == "one":
        return 1
    if isinstance(fill, int):
        return args[fill] if len(args) > fill else kwargs.get("fill_value")
    return None


def _deactivate() -> None:
    global _active
    _active = None


def _settled(storage: Storage) -> Storage:
    """Real memory to which recorded values were written, with them in it."""
    value = Value(storage, len(storage.writes), _all_of(storage), _bits_dtype(storage))
    numbers = read_now(value, None)
    real = storage.real
    assert real is not None and isinstance(storage.base, Constant)  # noqa: PT018, S101
    storage.base = Constant(storage.base.flat.clone(), storage.base.source)
    real.view(numbers.dtype).copy_(numbers)
    return Storage(Constant(real), storage.numel, storage.itemsize, keep=storage.keep, real=real)


def _bits_dtype(storage: Storage) -> torch.dtype:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sizes.get(storage.itemsize, torch.complex128)


def storage_of_plain(tensor: torch.Tensor) -> Storage:
    """A plain tensor's storage as a recorded one: real numbers, or nothing yet on meta."""
    kept = tensor.untyped_storage()
    size = tensor.dtype.itemsize
    numel = kept.nbytes() // size
    if tensor.device.type == "meta":
        return Storage(Unwritten(PARAMETER), numel, size, keep=kept)
    with torch.no_grad():
        flat = tensor.detach().as_strided((numel,), (1,), 0)
    return Storage(Constant(flat), numel, size, keep=kept, real=flat)


def read_now(value: Value, recorder: Recorder | None) -> torch.Tensor:
    """A value's numbers, read now: exactly the regions that it is made of."""
    with torch._C.DisableTorchFunction():
        expr = resolve(value)
        fetch = recorder.fetch if recorder is not None else fetch_from_files
        if recorder is not None:
            for src in sources_of(expr):
                if isinstance(src, Src):
                    nbytes = src.view.numel * src.view.itemsize
                    recorder.data_reads.append(DataRead(src.leaf.name, nbytes))
        return evaluate(expr, fetch).clone()


def fetch_from_files(src: Src) -> torch.Tensor:
    """A leaf's region by the file's own ``read``: for the few numbers asked for while tracing."""
    from loadkit.tracing.storage import FileLeaf

    leaf = src.leaf
    if not isinstance(leaf, FileLeaf):
        return generate(leaf, src)
    low, high = src.view.span()
    data = bytearray(leaf.info.file.read(leaf.info.offset + low, high - low))
    if not data:
        return torch.empty(src.size, dtype=src.dtype)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(src.dtype)
    return flat.as_strided(
        src.view.size, src.view.stride, src.view.offset - low // src.view.itemsize
    )


class _DispatchMode(TorchDispatchMode):
    """Correctness: every aten call of the thread passes here."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch's wrapper for that costs as much as a call itself, and imports a compiler."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        recorder = self.recorder
        if _active is not recorder:  # a thread that outlived its recording
            return func(*args, **kwargs)
        kind = operations.kind_of(func)
        with recorder.lock:
            if kind.factory and recorder.phase == "init":
                return recorder.make_initial(func, args, kwargs)
            if kind.odd:
                return operations.odd_write(func, args, kwargs, recorder)
            if kind.writes:
                target = args[0] if args else None
                if recorder._fills and isinstance(target, torch.Tensor):
                    recorder.forget_fill(target)
                if isinstance(target, torch.Tensor) and self._is_recorded(target, (args, kwargs)):
                    if (
                        recorder.phase == "init"
                        and func not in _INIT_WRITES
                        and target.device.type == "meta"
                    ):
                        return target  # an initialiser on a parameter: nothing to keep
                    return operations.call(func, args, kwargs)
                return func(*args, **kwargs)
            if kind.factory and recorder.phase == "load":
                return recorder.make_scratch(func, args, kwargs)
            if kind.view:
                if isinstance(args[0], LazyTensor):
                    return operations.call(func, args, kwargs)
                return func(*args, **kwargs)
            if operations.interesting((args, kwargs), recorder):
                return operations.call(func, args, kwargs)
            if recorder.phase == "load":
                if operations.reads_no_memory(func, (args, kwargs)):
                    return operations.call(func, args, kwargs)
                if operations.makes_numbers_on_meta(args, kwargs):
                    kwargs = {**kwargs, "device": "cpu"}
            return func(*args, **kwargs)

    def _is_recorded(self, target: torch.Tensor, tree: Any) -> bool:
        if isinstance(target, LazyTensor) or target.device.type == "meta":
            return True
        return self.recorder.tracked(target) is not None or operations.interesting(
            tree, self.recorder
        )


_INIT_WRITES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
}


class _FunctionMode(TorchFunctionMode):
    """What no aten call shows: ``param.data = x``, and reads behind torch's back."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _WATCHED and _active is self.recorder:
            if func == _SET_DATA:
                return self._set_data(args[0], args[1])
            if func in _MAKES_NUMBERS:
                if self.recorder.phase == "load":
                    args, kwargs = _off_meta(func, args, kwargs or {})
            elif not isinstance(args[0], LazyTensor):
                if func in _CLONES and self.recorder.is_changed(args[0]):
                    return operations.as_lazy(args[0], self.recorder).clone()
                self._refuse_if_changed(func, args[0])
        return func(*args, **kwargs) if kwargs else func(*args)

    def _set_data(self, target: torch.Tensor, value: torch.Tensor) -> None:
        """Re-home a parameter; on meta the new contents are recorded."""
        if isinstance(target, LazyTensor):
            raise TraceError("assigning .data of a tensor that is not in memory cannot be recorded")
        recorder = self.recorder
        alike = (target.device.type == "meta") == (value.device.type == "meta")
        if alike and not isinstance(value, LazyTensor):
            if id(recorder.tracked(target)) in recorder.live:
                recorder._rehomed.append((target, _twin(target, target.detach())))
            _SET_DATA(target, value)
            return
        with recorder.lock:
            home = recorder.home_of(value)
            if target.device.type == "meta":
                _SET_DATA(target, home)
            else:
                twin = _twin(target, home)
                torch.utils.swap_tensors(target, twin)
                recorder._rehomed.append((target, twin))

    def _refuse_if_changed(self, func: Any, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        on_meta = tensor.device.type == "meta"
        if func is torch.Tensor.untyped_storage and on_meta:
            return  # it has no bytes to lie about
        if not self.recorder.is_changed(tensor) and not (on_meta and func in _ADDRESSES):
            return
        storage = self.recorder.track(tensor)
        value = Value(storage, len(storage.writes), _all_of(storage), tensor.dtype)
        names = sorted(leaf_names(value))
        raise TraceError(
            f"{getattr(func, '__name__', func)} was asked of memory that is not written yet",
            tensor=names[0] if names else None,
            detail={"tensors": names},
        )


def _off_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call that would make numbers on meta, where they are lost: on the CPU."""
    on_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta"
    if func in _INDEXING and on_meta:
        args = (args[0], _index_off_meta(args[1]), *args[2:])
    elif func is torch.Tensor.new_tensor and on_meta:
        kwargs = {"device": "cpu", **kwargs}
    device = kwargs.get("device")
    data = kwargs.get("data", args[-1] if args else None)
    wanted = device is not None and torch.device(device).type == "meta"
    if wanted and not isinstance(data, torch.Tensor):
        kwargs = {**kwargs, "device": "cpu"}
    return args, kwargs


def _index_off_meta(index: Any) -> Any:
    if isinstance(index, (list, range)) or type(index).__name__ == "ndarray":
        has_tensors = isinstance(index, list) and any(isinstance(i, torch.Tensor) for i in index)
        return index if has_tensors else torch.tensor(index)
    if isinstance(index, tuple):
        return tuple(_index_off_meta(item) for item in index)
    return index


def _all_of(storage: Storage) -> View:
    return View((storage.numel,), (1,), 0, storage.itemsize)


def _twin(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor of the same Python type and attributes over other data."""
    twin = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_ADDRESSES = {torch.Tensor.data_ptr, torch.Tensor.share_memory_}
_CLONES = {torch.Tensor.__deepcopy__}
_INDEXING = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_MAKES_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor, *_INDEXING}
_WATCHED = {
    _SET_DATA,
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.storage,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.untyped_storage,
    *_ADDRESSES,
    *_CLONES,
    *_MAKES_NUMBERS,
}
