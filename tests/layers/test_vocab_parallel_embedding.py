"""Any vocabulary at any tp: the ranks join to the checkpoint, the rest is zero, tied or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.ranks import build_ranks, only_views_and_writes, parallel_of, randn, unchanged_by
from loadkit.config import ParallelConfig
from loadkit.errors import ModelError, WeightLoadError
from loadkit_layers import ParallelLMHead, VocabParallelEmbedding, pad_vocab_size

D = 16
ONE = ParallelConfig()


def load(layer: torch.nn.Module, tensor: torch.Tensor, name: str = "weight") -> None:
    param = getattr(layer, name)
    param.data.fill_(99)
    with only_views_and_writes():
        param.weight_loader(param, tensor)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab", [41, 40, 64, 300])
def test_TP_02_ranks_join_to_the_checkpoint_and_padding_is_zero(
    vocab: int, tp: int, tied: bool
) -> None:
    table, head_table = randn(vocab, D), randn(vocab, D, seed=1)
    embeddings = build_ranks(tp, lambda p: VocabParallelEmbedding(vocab, D, parallel=p))
    heads = build_ranks(tp, lambda p: ParallelLMHead(vocab, D, parallel=p))
    for embedding, head in zip(embeddings, heads, strict=True):
        load(embedding, table)
        if tied:
            assert head.tie_weights(embedding) is head
            assert head.weight is embedding.weight
        else:
            load(head, head_table)
        assert head.num_embeddings_padded == embedding.num_embeddings_padded
        assert head.weight.shape == embedding.weight.shape
    for layers, whole in ((embeddings, table), (heads, table if tied else head_table)):
        joined = torch.cat([layer.weight for layer in layers])
        assert torch.equal(joined[:vocab], whole)
        assert not joined[vocab:].any()
        assert sum(layer.num_padding_rows for layer in layers) == len(joined) - vocab
        assert len(joined) == pad_vocab_size(vocab, tp)


@pytest.mark.parametrize("tp", [1, 2, 3, 5, 6, 7, 8, 12, 24])
@pytest.mark.parametrize("vocab", [1, 41, 32001, 129280, 250682])
def test_the_padded_size_is_one_multiple_of_64_per_rank(vocab: int, tp: int) -> None:
    padded = pad_vocab_size(vocab, tp)
    assert padded % (64 * tp) == 0
    assert vocab <= padded < vocab + 64 * tp


def test_the_padding_quantum_can_be_chosen() -> None:
    layer = VocabParallelEmbedding(41, D, parallel=parallel_of(2)[1], padding_size=1)
    load(layer, randn(41, D))
    assert layer.weight.shape == (21, D)
    assert layer.num_padding_rows == 1
    assert torch.equal(layer.weight[:20], randn(41, D)[21:])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_added_tokens_that_the_checkpoint_lacks_are_zero(tp: int) -> None:
    old, new = randn(60, D), randn(70, D)
    for table in (old, new):
        layers = build_ranks(
            tp, lambda p: VocabParallelEmbedding(70, D, parallel=p, org_num_embeddings=60)
        )
        for layer in layers:
            load(layer, table)
        joined = torch.cat([layer.weight for layer in layers])
        assert torch.equal(joined[: len(table)], table)
        assert not joined[len(table) :].any()


@pytest.mark.parametrize("tp", [1, 3])
def test_the_heads_bias_is_cut_and_padded_like_its_rows(tp: int) -> None:
    bias = randn(41)
    heads = build_ranks(tp, lambda p: ParallelLMHead(41, D, bias=True, parallel=p))
    for head in heads:
        load(head, bias, "bias")
    joined = torch.cat([head.bias for head in heads])
    assert torch.equal(joined[:41], bias)
    assert not joined[41:].any()


@pytest.mark.parametrize("rows", [42, 39, 64, 128])
@pytest.mark.parametrize("kind", [VocabParallelEmbedding, ParallelLMHead])
def test_CFG_05_other_rows_than_vocab_size_are_refused_with_the_fix(kind: Any, rows: int) -> None:
    layer = kind(40, D, parallel=parallel_of(2)[0], prefix="model.embed_tokens")
    layer.weight.data.fill_(7)
    with unchanged_by(layer.weight), pytest.raises(WeightLoadError) as caught:
        layer.weight.weight_loader(layer.weight, randn(rows, D))
    text = str(caught.value)
    assert caught.value.parameter == "model.embed_tokens.weight"
    for said in (f"[{rows}, {D}]", f"[64, {D}]", "vocab_size 40", f"set vocab_size to {rows}"):
        assert said in text


@pytest.mark.parametrize("shape", [(40, D + 1), (40,), (40, D, 1), ()])
def test_another_width_is_refused_and_nothing_is_written(shape: tuple[int, ...]) -> None:
    layer = VocabParallelEmbedding(40, D, parallel=ONE)
    layer.weight.data.fill_(7)
    with unchanged_by(layer.weight), pytest.raises(WeightLoadError):
        layer.weight.weight_loader(layer.weight, torch.zeros(shape))


def test_forward_at_tp_1_looks_rows_up() -> None:
    layer, table = VocabParallelEmbedding(41, D, parallel=ONE), randn(41, D)
    load(layer, table)
    ids = torch.tensor([0, 40, 7, 7])
    assert torch.equal(layer(ids), table[ids])
    head = ParallelLMHead(41, D, parallel=ONE).tie_weights(layer)
    logits = head(randn(3, D))
    assert logits.shape == (3, 64)
    assert torch.equal(logits, randn(3, D) @ layer.weight.T)


def test_layers_that_are_cut_differently_are_not_tied() -> None:
    embedding = VocabParallelEmbedding(40, D, parallel=ONE, prefix="embed")
    head = ParallelLMHead(40, D, parallel=ONE, padding_size=100, prefix="lm_head")
    with pytest.raises(ModelError, match=r"lm_head \(100.*embed \(64"):
        head.tie_weights(embedding)


def test_a_tied_heads_table_is_one_parameter_of_the_model() -> None:
    model = torch.nn.Module()
    model.embed = VocabParallelEmbedding(40, D, parallel=ONE)
    model.head = ParallelLMHead(40, D, bias=True, parallel=ONE).tie_weights(model.embed)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "head.bias"]


def test_a_method_that_cannot_look_rows_up_is_refused() -> None:
    from loadkit.quantization import LinearMethodBase

    class Only(LinearMethodBase):
        def create_weights(self, layer: Any, *args: Any, **kwargs: Any) -> None:
            layer.register_parameter("weight", torch.nn.Parameter(torch.zeros(64, D), False))

        def apply(self, layer: Any, x: Any, bias: Any = None) -> Any:
            return x @ layer.weight.T

    class Config:
        def get_quant_method(self, layer: Any, prefix: str) -> Only:
            return Only()

    config: Any = Config()
    with pytest.raises(ModelError, match="Only cannot look up rows"):
        VocabParallelEmbedding(40, D, parallel=ONE, quant_config=config)
    assert ParallelLMHead(40, D, parallel=ONE, quant_config=config)(randn(2, D)).shape == (2, 64)


@pytest.mark.parametrize("tp", [1, 3])
def test_packed_rows_of_a_table_are_cut_and_padded_too(tp: int) -> None:
    """Entries of 4 numbers along the width, as a packed table has them."""
    from loadkit_layers import PackedParameter, UnquantizedLinearMethod

    class Packed(UnquantizedLinearMethod):
        def create_weights(
            self, layer: Any, width: int, rows: Any, i: int, o: int, dtype: Any, **attrs: Any
        ) -> None:
            data = torch.empty(sum(rows), width // 4, dtype=torch.int32)
            dims = {"output_dim": 0, "input_dim": 1, "packed_dim": 1, "packed_factor": 4}
            layer.register_parameter("qweight", PackedParameter(data, **dims, **attrs))

    class Config:
        def get_quant_method(self, layer: Any, prefix: str) -> Packed:
            return Packed()

    config: Any = Config()
    table = torch.arange(41 * D // 4, dtype=torch.int32).view(41, -1)
    layers = build_ranks(
        tp, lambda p: VocabParallelEmbedding(41, D, parallel=p, quant_config=config)
    )
    heads = build_ranks(tp, lambda p: ParallelLMHead(41, D, parallel=p))
    for layer, head in zip(layers, heads, strict=True):
        load(layer, table, "qweight")
        head.tie_weights(layer)
        assert [name for name, _ in head.named_parameters()] == ["qweight"]
    joined = torch.cat([layer.qweight for layer in layers])
    assert torch.equal(joined[:41], table)
    assert not joined[41:].any()
