"""Mixtures of experts in 4 bits or int8. E slots, D width, I inner width, R tp size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from loadkit.quantization import FusedMoEMethodBase
from loadkit_bitsandbytes.arithmetic import Quantised, dequantise, quantise
from loadkit_bitsandbytes.eight_bit import dequantise_rows, multiply_rows, quantise_rows
from loadkit_bitsandbytes.four_bit import multiply_all, piece_tensors, tensors_of
from loadkit_bitsandbytes.misaligned import Misaligned, mark
from loadkit_bitsandbytes.online import other_bytes, quantised_bytes, register, stacked
from loadkit_bitsandbytes.options import QuantOptions
from loadkit_bitsandbytes.packed_parameter import PackedParameter4bit
from loadkit_bitsandbytes.piece import Piece
from loadkit_bitsandbytes.pieces_of import LayerShards, create_packed, parts_of, pieces_of
from loadkit_bitsandbytes.survey import StoredMatrix
from loadkit_layers.fused_moe import ExpertParameter, UnquantizedFusedMoEMethod, run_experts
from loadkit_layers.parameter import ChannelQuantScaleParameter, ModelWeightParameter

if TYPE_CHECKING:
    from loadkit_bitsandbytes.config import BitsAndBytesConfig
    from loadkit_layers.fused_moe import FusedMoE

__all__ = ["ExpertsMethod", "OnlineExpertsMethod", "StoredExpertsMethod"]

STEMS = ("w13", "w2")
_int8 = partial(ModelWeightParameter, output_dim=0, input_dim=1)
_scales = partial(ChannelQuantScaleParameter, output_dim=0)


class ExpertsMethod(FusedMoEMethodBase):
    """The side that uses weights: every slot's are flat tensors, or int8 rows with scales.

    A layer has ``bitsandbytes_experts``: stem -> the pieces of one slot; none where it is int8.
    """

    def __init__(self, options: QuantOptions) -> None:
        self.options = options

    def apply(
        self, layer: nn.Module, x: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        moe: FusedMoE = layer  # type: ignore[assignment]
        numbers = x.to(self.options.compute_dtype or x.dtype) if self._four_bit(layer) else x

        def expert(slot: int, tokens: torch.Tensor) -> torch.Tensor:
            inner = moe.act_fn(self._multiply(layer, "w13", slot, tokens))
            return self._multiply(layer, "w2", slot, inner)

        return run_experts(numbers, weights, slots, expert).to(x.dtype)

    def _multiply(self, layer: nn.Module, stem: str, slot: int, x: torch.Tensor) -> torch.Tensor:
        if self._four_bit(layer):
            parts = multiply_all(x, self._pieces(layer, stem), self._slot(layer, stem, slot))
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        weight, scales = self._rows(layer, stem, slot)
        return multiply_rows(x, weight, scales, None, self.options.llm_int8_threshold)

    def dequantised(self, layer: nn.Module, stem: str, slot: int) -> torch.Tensor:
        """A slot's weight as numbers: [2 I/R, D] of "w13", [D, I/R] of "w2"."""
        if not self._four_bit(layer):
            return dequantise_rows(*self._rows(layer, stem, slot))
        found = parts_of(self._pieces(layer, stem), self._slot(layer, stem, slot))
        return torch.cat([dequantise(piece, own) for piece, own in found])

    def checkpoint_tensors(
        self, layer: nn.Module, name: str, shard_id: Any
    ) -> dict[str, torch.Tensor] | None:
        """What a checkpoint has of a part of one expert: suffix -> tensor."""
        stem, _, role = name.partition("_")
        if layer.get_parameter(f"{stem}_weight").dtype not in (torch.uint8, torch.int8):
            return None  # plain numbers: not quantised yet
        if role != "weight":
            return {}
        part, expert = shard_id
        moe: FusedMoE = layer  # type: ignore[assignment]
        slot = moe._slots[expert][0]
        shards = getattr(layer, f"{stem}_shards")
        index = next(shard.index for shard in shards if shard.id == part)
        if self._four_bit(layer):
            found = list(parts_of(self._pieces(layer, stem), self._slot(layer, stem, slot)))
            return piece_tensors(*found[index])
        weight, scales = self._rows(layer, stem, slot)
        start, size = shards[index].offset, shards[index].size
        return {
            "": weight.narrow(0, start, size),
            "/SCB": scales.narrow(0, start, size),
            "/weight_format": torch.zeros((), dtype=torch.uint8),
        }

    @staticmethod
    def _four_bit(layer: nn.Module) -> bool:
        return bool(getattr(layer, "bitsandbytes_experts", None))

    @staticmethod
    def _pieces(layer: nn.Module, stem: str) -> Sequence[Piece]:
        pieces: dict[str, Sequence[Piece]] = getattr(layer, "bitsandbytes_experts", {})
        return pieces[stem]

    @staticmethod
    def _slot(layer: nn.Module, stem: str, slot: int) -> dict[str, torch.Tensor]:
        return {role: t[slot] for role, t in tensors_of(layer, f"{stem}_weight").items()}

    @staticmethod
    def _rows(layer: nn.Module, stem: str, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = layer.get_parameter(f"{stem}_weight").data[slot]
        return weight, layer.get_parameter(f"{stem}_SCB").data[slot]


class StoredExpertsMethod(ExpertsMethod):
    """Experts as the checkpoint has them, where all of a layer are quantised in one way."""

    def __init__(self, config: BitsAndBytesConfig, prefix: str) -> None:
        super().__init__(config.options)
        self.config, self.prefix = config, prefix

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        D, size = hidden_size, intermediate_size_per_partition
        sizes = num_experts, D, size
        found = self._found(layer)
        matrices = [m for by in (found or {}).values() for own in by.values() for m in own]
        if matrices and all(matrix.state is None for matrix in matrices):
            self._create_eight_bit(layer, *sizes, extra_weight_attrs)
            return
        pieces = self._all_pieces(layer, found, D, size) if found else None
        if found is None or pieces is None or not self._fits(layer, pieces):
            plain = UnquantizedFusedMoEMethod()
            layer.quant_method = plain  # type: ignore[assignment]  # a layer's own attribute
            plain.create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
            return
        self._create(layer, num_experts, pieces, extra_weight_attrs)

    @staticmethod
    def taken(layer: nn.Module) -> tuple[str, ...]:
        """The checkpoint's matrices that the layer takes as they are."""
        names: tuple[str, ...] = getattr(layer, "bitsandbytes_tensors", ())
        return names

    def _found(self, layer: nn.Module) -> dict[str, dict[int, list[StoredMatrix]]] | None:
        """Stem -> expert -> the matrices of its shards; None where one has none."""
        moe: FusedMoE = layer  # type: ignore[assignment]
        table = self.config.table
        if table is None or moe.disk_layout != "output_input" or not moe._slots:
            return None
        found: dict[str, dict[int, list[StoredMatrix]]] = {}
        for stem in STEMS:
            own = table.experts(self.prefix, moe._slots, getattr(moe, f"{stem}_shards"))
            if own is None:
                return None
            found[stem] = own
        return found

    @staticmethod
    def _all_pieces(
        layer: nn.Module, found: dict[str, dict[int, list[StoredMatrix]]], D: int, size: int
    ) -> dict[str, dict[int, list[Piece]]] | None:
        """Stem -> expert -> its pieces; None where they are not all alike."""
        moe: FusedMoE = layer  # type: ignore[assignment]
        rank, R = moe.tp_rank, moe.tp_size
        gate_up = LayerShards(moe.w13_shards, (rank * size,) * 2, (size * R,) * 2, D, 0, D)
        down = LayerShards(moe.w2_shards, (0,), (D,), size, rank * size, size * R)
        made: dict[str, dict[int, list[Piece]]] = {}
        for stem, shape in (("w13", gate_up), ("w2", down)):
            made[stem] = {}
            shapes: set[tuple[Piece, ...]] = set()
            for expert, matrices in found[stem].items():
                pieces = pieces_of(shape, matrices)
                if pieces is None:
                    return None
                made[stem][expert] = pieces
                shapes.add(tuple(replace(piece, tensor="", offset=0.0) for piece in pieces))
            if len(shapes) != 1 or len({bool(p.scheme.nested) for p in next(iter(shapes))}) != 1:
                return None
        return made

    def _fits(self, layer: nn.Module, pieces: dict[str, dict[int, list[Piece]]]) -> bool:
        """Whether no piece begins inside a block; notes those that do."""
        bad = [
            (stem, piece)
            for stem, by in pieces.items()
            for own in by.values()
            for piece in own
            if not piece.fits
        ]
        if bad and self.config.misaligned == "error":
            size = int(getattr(layer, "tp_size", 1))
            mark(
                layer,
                [Misaligned.of(p, f"{self.prefix}.{stem}_weight", size) for stem, p in bad],
            )
        return not bad

    def _create(
        self,
        layer: nn.Module,
        num_experts: int,
        pieces: dict[str, dict[int, list[Piece]]],
        attrs: dict[str, Any],
    ) -> None:
        moe: FusedMoE = layer  # type: ignore[assignment]
        layouts: dict[str, tuple[Piece, ...]] = {}
        for stem, by_expert in pieces.items():
            one = next(iter(by_expert.values()))
            shards = getattr(moe, f"{stem}_shards")
            for role, param in create_packed(one, {"tp_rank": moe.tp_rank, "tp_size": moe.tp_size}):
                data = torch.empty((num_experts, param.numel()), dtype=param.dtype)
                member = partial(PackedParameter4bit, cuts=param.cuts)
                name = f"{stem}_weight" if role == "weight" else f"{stem}_weight_{role}"
                made = ExpertParameter(data, member=member, shards=shards, **attrs)
                layer.register_parameter(name, made)
            if one[0].scheme.nested:
                offsets = torch.zeros((num_experts, len(one)), dtype=torch.float32)
                for expert, own in by_expert.items():
                    for slot in moe._slots[expert]:
                        offsets[slot] = torch.tensor([piece.offset for piece in own])
                layer.register_buffer(f"{stem}_weight_nested_offset", offsets)
            layouts[stem] = tuple(one)
        names = [p.tensor for by in pieces.values() for own in by.values() for p in own]
        layer.bitsandbytes_experts = layouts  # type: ignore[assignment]
        layer.bitsandbytes_tensors = tuple(names)  # type: ignore[assignment]

    def _create_eight_bit(
        self, layer: nn.Module, E: int, D: int, size: int, attrs: dict[str, Any]
    ) -> None:
        moe: FusedMoE = layer  # type: ignore[assignment]
        for stem, N, K in (("w13", 2 * size, D), ("w2", D, size)):
            shards = getattr(moe, f"{stem}_shards")
            weight = torch.empty((E, N, K), dtype=torch.int8)
            param = ExpertParameter(weight, member=_int8, shards=shards, **attrs)
            layer.register_parameter(f"{stem}_weight", param)
            scales = torch.empty((E, N), dtype=torch.float32)
            param = ExpertParameter(scales, member=_scales, shards=shards, **attrs)
            layer.register_parameter(f"{stem}_SCB", param)
        found = self._found(layer) or {}
        names = [m.name for by in found.values() for own in by.values() for m in own]
        layer.bitsandbytes_tensors = tuple(names)  # type: ignore[assignment]


class OnlineExpertsMethod(ExpertsMethod):
    """Experts that are quantised once a layer's are loaded, each of their matrices by itself."""

    uses_meta_device: ClassVar[bool] = True
    layout_version: ClassVar[int | None] = 1

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        D, size = hidden_size, intermediate_size_per_partition
        UnquantizedFusedMoEMethod().create_weights(
            layer, num_experts, D, size, params_dtype, **extra_weight_attrs
        )
        if self.options.load_in_8bit:
            return
        scheme = self.options.scheme(params_dtype)
        layer.bitsandbytes_experts = {  # type: ignore[assignment]
            "w13": (Piece.whole(scheme, size, D), Piece.whole(scheme, size, D)),
            "w2": (Piece.whole(scheme, D, size),),
        }

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Quantise every slot's matrices."""
        for stem in STEMS:
            name = f"{stem}_weight"
            raw = layer.get_parameter(name)
            if self.options.load_in_8bit:
                rows = raw.data.view(-1, raw.shape[-1])
                weight, scales = quantise_rows(rows)
                made = {"weight": weight.view(raw.shape), "SCB": scales.view(raw.shape[:-1])}
                register(layer, name, {"weight": made["weight"]}, raw)
                register(layer, f"{stem}_SCB", {"weight": made["SCB"]}, raw)
                continue
            slots: list[dict[str, torch.Tensor]] = []
            for slot in range(raw.shape[0]):
                own: list[Quantised] = []
                at = 0
                for piece in self._pieces(layer, stem):
                    part = raw.data[slot].narrow(0, at, piece.rows)
                    own.append(quantise(part, piece.scheme))
                    at += piece.rows
                slots.append(stacked(own))
            roles = slots[0] if slots else {}
            tensors = {role: torch.stack([one[role] for one in slots]) for role in roles}
            register(layer, name, tensors, raw)

    def bytes_after_loading(self, layer: nn.Module) -> int:
        names = [f"{stem}_weight" for stem in STEMS]
        total = other_bytes(layer, *names)
        for stem, name in zip(STEMS, names, strict=True):
            raw = layer.get_parameter(name)
            if self.options.load_in_8bit:
                total += raw.numel() + 4 * raw.shape[0] * raw.shape[1]
            else:
                total += raw.shape[0] * quantised_bytes(self._pieces(layer, stem))
        return total
