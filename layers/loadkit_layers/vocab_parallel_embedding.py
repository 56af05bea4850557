"""The vocabulary over R tensor-parallel ranks: the input embedding and the output head.

V vocabulary, P padded vocabulary, D model width, T tokens, R tp size. Rank r holds rows
r P/R to (r + 1) P/R of [P, D]; rows from V on are padding and zero. The embedding and the head get
P from one function, so they can share their weight at any V and R.
"""

from __future__ import annotations

from typing import Any

import torch

from loadkit.config import ParallelConfig
from loadkit.errors import ModelError
from loadkit.quantization import (
    QuantizationConfig,
    QuantizeMethodBase,
    method_has_implemented_embedding,
)
from loadkit.tracing.regions import copies_regions
from loadkit_layers.communication import all_reduce
from loadkit_layers.parameter import ColumnParameter, as_sharded
from loadkit_layers.sharding import Cut, misfit
from loadkit_layers.unquantized import UnquantizedLinearMethod

__all__ = [
    "DEFAULT_VOCAB_PADDING_SIZE",
    "ParallelLMHead",
    "VocabParallelEmbedding",
    "pad_vocab_size",
]

DEFAULT_VOCAB_PADDING_SIZE = 64


def pad_vocab_size(
    vocab_size: int, tp_size: int, padding_size: int = DEFAULT_VOCAB_PADDING_SIZE
) -> int:
    """P: ``vocab_size`` rounded up, so that all ranks get one multiple of ``padding_size``."""
    quantum = padding_size * tp_size
    return -(-vocab_size // quantum) * quantum


class VocabParallelEmbedding(torch.nn.Module):
    """Token ids to vectors, with rows of the table cut over the ranks.

    Args:
        num_embeddings: V, tokens added to the vocabulary included.
        embedding_dim: D.
        parallel: this rank's place; no default.
        params_dtype: the table's dtype; None: torch's default dtype.
        org_num_embeddings: the rows of the checkpoint where it does not have the added tokens;
            None: V. Added rows that the checkpoint lacks are zero.
        padding_size: every rank's rows are a multiple of it.
        quant_config: where the layer's method comes from; None: plain weights.
        prefix: the layer's dotted name, for quantisation and errors.

    Attributes:
        num_embeddings_padded: P.
        num_embeddings_per_partition: P / R.
        vocab_start_index: the first token of this rank.
        vocab_end_index: one past the last row of this rank, padding included.
        num_padding_rows: the rank's rows that no token of V owns.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        parallel: ParallelConfig,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.parallel, self.prefix, self.quant_config = parallel, prefix, quant_config
        self.tp_rank, self.tp_size = parallel.tp_rank, parallel.tp_size
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.org_vocab_size = num_embeddings if org_num_embeddings is None else org_num_embeddings
        self.padding_size = padding_size
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.num_embeddings_padded = pad_vocab_size(num_embeddings, self.tp_size, padding_size)
        rows = self.num_embeddings_padded // self.tp_size
        self.num_embeddings_per_partition = rows
        self.vocab_start_index = self.tp_rank * rows
        self.vocab_end_index = self.vocab_start_index + rows
        self.num_padding_rows = rows - self._rows_within(num_embeddings)
        self.quant_method = self._choose_method()
        self._create_parameters()

    def _choose_method(self) -> QuantizeMethodBase:
        """The method of the quantisation config, or plain weights; a table has to be looked up."""
        found = None
        if self.quant_config is not None:
            found = self.quant_config.get_quant_method(self, self.prefix)
        method = found or UnquantizedLinearMethod()
        if not isinstance(self, ParallelLMHead) and not method_has_implemented_embedding(method):
            raise ModelError(
                f"layer {self.prefix}: {type(method).__name__} cannot look up rows of a table",
                parameter=self.prefix or None,
                hint="its get_quant_method should give None for VocabParallelEmbedding",
            )
        return method

    def _rows_within(self, limit: int) -> int:
        """How many of this rank's rows are below ``limit``."""
        return max(0, min(limit, self.vocab_end_index) - self.vocab_start_index)

    def _attrs(self) -> dict[str, Any]:
        """What every parameter carries."""
        return {
            "weight_loader": self.weight_loader,
            "tp_rank": self.tp_rank,
            "tp_size": self.tp_size,
        }

    def _create_parameters(self) -> None:
        """Let the method make the table; name every parameter for its errors."""
        self.quant_method.create_weights(
            self,
            self.embedding_dim,
            [self.num_embeddings_per_partition],
            self.embedding_dim,
            self.num_embeddings_padded,
            self.params_dtype,
            **self._attrs(),
        )
        self._name_parameters()

    def _name_parameters(self) -> None:
        for name, param in self.named_parameters(recurse=False):
            setattr(param, "parameter_name", f"{self.prefix}.{name}" if self.prefix else name)  # noqa: B010

    @copies_regions
    def weight_loader(self, param: torch.nn.Parameter, loaded_weight: torch.Tensor) -> None:
        """Copy this rank's rows and zero the rest of them.

        A rank whose rows are all padding still takes part, with a copy of no rows.

        Raises:
            WeightLoadError: the checkpoint has neither V nor ``org_num_embeddings`` rows, or
                another width; the parameter is untouched.
        """
        target = as_sharded(param, tp_rank=self.tp_rank, tp_size=self.tp_size)
        if not isinstance(target, ColumnParameter):
            target.load_column_parallel_weight(loaded_weight)
            return
        dim, units = target.output_dim, target.output_units
        rows = self._checked_rows(target, loaded_weight)
        own, start = units(self._rows_within(rows)), units(min(self.vocab_start_index, rows))
        target.copy_part(loaded_weight, Cut(dim, 0, own, start, units(rows)))
        if own < target.shape[dim]:
            target.data.narrow(dim, own, target.shape[dim] - own).fill_(0)

    def _checked_rows(self, param: ColumnParameter, loaded_weight: torch.Tensor) -> int:
        """The checkpoint's rows, if it is a number of rows this layer expects."""
        for rows in {self.num_embeddings, self.org_vocab_size}:
            size = param.output_units(rows)
            if loaded_weight.dim() == param.dim() and loaded_weight.shape[param.output_dim] == size:
                return rows
        expected = list(param.shape)
        expected[param.output_dim] = param.output_units(self.org_vocab_size)
        found = loaded_weight.shape[param.output_dim] if loaded_weight.dim() else 0
        raise misfit(
            param,
            loaded_weight,
            expected,
            what=f"vocab_size {self.num_embeddings}",
            hint=f"set vocab_size to {found} in config.json (or by hf_overrides) if tokens were "
            f"added, or resize the checkpoint's embeddings to {self.org_vocab_size} rows",
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] of any integer dtype -> vectors [T, D]; summed over the ranks."""
        if self.tp_size == 1:
            return self._lookup(input_ids)
        outside = (input_ids < self.vocab_start_index) | (input_ids >= self.vocab_end_index)
        vectors = self._lookup((input_ids - self.vocab_start_index).masked_fill(outside, 0))
        return all_reduce(vectors.masked_fill(outside.unsqueeze(-1), 0), self.parallel)

    def _lookup(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's table."""
        return self.quant_method.embedding(self, rows)

    def layout(self) -> tuple[int, int, int, int]:
        """What two layers that share a table have to agree on."""
        return self.num_embeddings_padded, self.embedding_dim, self.tp_rank, self.tp_size

    def extra_repr(self) -> str:
        return (
            f"vocab={self.num_embeddings}, padded={self.num_embeddings_padded}, "
            f"dim={self.embedding_dim}, tp_rank={self.tp_rank}, tp_size={self.tp_size}"
        )


class ParallelLMHead(VocabParallelEmbedding):
    """Vectors to logits, with the same rows on the same rank as the embedding.

    Args:
        bias: add a bias [V], cut and padded like the rows.
        **base: as ``VocabParallelEmbedding``.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        *,
        parallel: ParallelConfig,
        **base: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, parallel=parallel, **base)
        self.register_parameter("bias", self._create_bias() if bias else None)
        self._name_parameters()

    def _create_bias(self) -> ColumnParameter:
        data = torch.empty(self.num_embeddings_per_partition, dtype=self.params_dtype)
        return ColumnParameter(data, output_dim=0, **self._attrs())

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Use the embedding's table (its very parameters) instead of an own one; gives ``self``.

        Raises:
            ModelError: the two are cut differently.
        """
        ours, theirs = self.layout(), embed_tokens.layout()
        if ours != theirs:
            raise ModelError(
                f"{self.prefix} {ours} and {embed_tokens.prefix} {theirs} (padded vocabulary, "
                "width, tp rank, tp size) cannot share one table",
                parameter=self.prefix or None,
            )
        for name in [name for name in self._parameters if name != "bias"]:
            del self._parameters[name]
        for name, param in embed_tokens.named_parameters(recurse=False):
            self.register_parameter(name, param)
        self.quant_method = embed_tokens.quant_method
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vectors [T, D] -> this rank's logits [T, P/R], padding rows included."""
        return self.quant_method.apply(self, hidden, self.bias)
