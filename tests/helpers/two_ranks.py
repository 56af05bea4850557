"""What real ranks compute, in processes started by a test: importable, so that it can be spawned.

T tokens, K input width, F hidden width, H heads of S features, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from helpers.ranks import randn
from loadkit.config import ParallelConfig
from loadkit.errors import DistributedError
from loadkit_layers import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    SiluAndMul,
    VocabParallelEmbedding,
    all_gather,
    all_reduce,
    init_parallel_groups,
    tp_group,
)

__all__ = ["forward_everything", "rank_main"]

T, K, F, H, S, V = 5, 12, 16, 4, 6, 41


def _loaded(layer: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The layer with seeded numbers, put in through its own weight loaders."""
    for offset, (name, rows, columns) in enumerate(_shapes(layer)):
        param = getattr(layer, name)
        tensor = randn(rows, *columns, seed=seed + offset)
        param.weight_loader(param, tensor)
    return layer


def _shapes(layer: torch.nn.Module) -> list[tuple[str, int, tuple[int, ...]]]:
    if isinstance(layer, VocabParallelEmbedding):
        rows, columns = layer.num_embeddings, layer.embedding_dim
    elif isinstance(layer, QKVParallelLinear):
        rows = (H + 2 * layer.total_num_kv_heads) * S
        columns = layer.input_size
    else:
        rows, columns = layer.output_size, layer.input_size
    bias = [("bias", rows, ())] if getattr(layer, "bias", None) is not None else []
    return [("weight", rows, (columns,)), *bias]


def forward_everything(parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    """The outputs of every kind of layer, equal at every tp up to the order of summation."""
    x = randn(T, K, seed=1)
    alone = {"parallel": parallel, "return_bias": False}
    out: dict[str, torch.Tensor] = {}

    column = _loaded(ColumnParallelLinear(K, F, **alone), 10)
    row = _loaded(RowParallelLinear(F, K, **alone), 20)
    out["column_row"] = row(torch.relu(column(x)))
    whole = _loaded(RowParallelLinear(K, F, input_is_parallel=False, **alone), 25)
    out["row_of_whole_input"] = whole(x)

    merged = _loaded(MergedColumnParallelLinear(K, [F, F], **alone), 30)
    down = _loaded(RowParallelLinear(F, K, False, **alone), 40)
    out["merged_row"] = down(SiluAndMul()(merged(x)))
    gathering = MergedColumnParallelLinear(K, [F, 2 * F], gather_output=True, **alone)
    out["merged_gathered"] = _loaded(gathering, 30)(x)

    for kv_heads in (4, 2, 1):
        qkv = _loaded(QKVParallelLinear(K, S, H, kv_heads, **alone), 50)
        parts = qkv(x).split(qkv.output_partition_sizes, dim=-1)
        for shard, part in zip(qkv.output_shards, parts, strict=True):
            every = all_gather(part, parallel).unflatten(-1, (parallel.tp_size, -1))
            out[f"{shard.id}_of_{kv_heads}"] = every[:, :: shard.replicas].flatten(1)

    embedding = _loaded(VocabParallelEmbedding(V, K, parallel=parallel), 60)
    head = _loaded(ParallelLMHead(V, K, bias=True, parallel=parallel), 70)
    hidden = embedding(torch.tensor([0, 40, 31, 32, 7]))
    out["embedding"] = hidden
    out["logits"] = all_gather(head(hidden), parallel)[:, :V]
    tied = ParallelLMHead(V, K, parallel=parallel).tie_weights(embedding)
    out["tied_logits"] = all_gather(tied(hidden), parallel)[:, :V]
    return out


def refusals(rank: int) -> list[str]:
    """What a live process group says to places that are not this rank's."""
    said = []
    for wrong in (
        ParallelConfig(tp_size=2, tp_rank=1 - rank),
        ParallelConfig(tp_size=4, tp_rank=rank),
        ParallelConfig(pp_size=2, pp_rank=rank),
    ):
        try:
            tp_group(wrong)
        except DistributedError as error:
            said.append(str(error))
    return said


def rank_main(rank: int, folder: str) -> None:
    """One of two ranks: compute, compare the groups, write ``rank<r>.safetensors``."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        parallel = ParallelConfig(tp_size=2, tp_rank=rank)
        out = forward_everything(parallel)
        said = refusals(rank)
        init_parallel_groups(parallel)
        first = tp_group(parallel)
        init_parallel_groups(parallel)
        assert tp_group(parallel) is first
        out["sum"] = all_reduce(torch.tensor([rank + 1.0]), parallel)
        stage = ParallelConfig(pp_size=2, pp_rank=rank)
        init_parallel_groups(stage)
        assert dist.get_process_group_ranks(tp_group(stage)) == [rank]
        out = {name: tensor.contiguous() for name, tensor in out.items()}
        save_file(out, str(Path(folder) / f"rank{rank}.safetensors"))
        (Path(folder) / f"rank{rank}.txt").write_text("\n".join(said))
    finally:
        dist.destroy_process_group()
