"""A checkpoint loaded by two real processes computes what one process computes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.checkpoints import write_llama
from helpers.loaded_ranks import compute, two_ranks
from loadkit.config import ParallelConfig


@pytest.mark.parametrize("alias", ["auto", "never"])
def test_two_gloo_ranks_equal_one(tmp_path: Path, alias: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_llama(folder, hidden=64, heads=8, kv_heads=2, ffn=96, vocab=41, layers=3)
    alone = compute(folder, ParallelConfig(), alias)
    ranks = two_ranks(folder, tmp_path, alias)
    for rank in ranks:
        for key in ("hidden", "logits"):
            # float32: the ranks' partial sums are added in another order, over 3 layers of
            # unscaled random weights; the families' own bound
            torch.testing.assert_close(rank[key], alone[key], rtol=1e-4, atol=1e-4)
        planned, read = rank["bytes"].tolist()
        assert planned == read < alone["bytes"][0]
    assert ranks[0]["hidden"].equal(ranks[1]["hidden"])
