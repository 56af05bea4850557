"""The one mechanism: weight loaders run on tensors that know where their bytes are, not what.

``view``         strided regions of a storage, and how two of them relate
``storage``      a storage, its ordered writes, and a value: what a view of it held at a moment
``lazy_tensor``  the ``torch.Tensor`` that carries such a value through anybody's code
``recorder``     sees every operation from construction to the end of ``load_weights``
``program``      turns recorded values into expressions over regions of files
``coverage``     which elements were written, by what, how often
"""

from loadkit.tracing.misfit import report_misfit, set_sink

__all__ = ["report_misfit", "set_sink"]
