"""The one mechanism: weight loaders run on tensors that know where their bytes are, not what.

A storage, its writes and what they come to:

``view``        strided regions of a storage, and how two of them relate
``storage``     a storage, its ordered writes, and a value: what a view of it held at a moment
``expressions`` what a value is made of
``layers``      many writes to one storage, found by place
``program``     recorded values as expressions over regions of files; ``evaluate`` computes them,
                ``replay`` write by write where boxes cannot say it
``coverage``    which elements were written, by what, how often
``pairing``     two views of one size as runs of bytes
``blocks``, ``encoded``   tensors stored in blocks

How code is recorded:

``lazy_tensor``  the ``torch.Tensor`` that carries such a value through anybody's code
``recorder``     one recording, from construction to the end of ``load_weights``; ``modes`` feed it,
                 ``observed`` carries the weights, ``threads`` passes it on
``operations``   what a call means: ``view_calls``, ``writes``, ``index_calls``, ``lowered``,
                 ``deferred``, on the ground of ``schema`` and ``lazies``
``regions``      the copy that most loaders end in, recorded without a detour
``reading``      numbers that are asked for while tracing
``leaks``        lazy tensors that loader code kept
"""

from loadkit.tracing.misfit import report_misfit, set_sink

__all__ = ["report_misfit", "set_sink"]
