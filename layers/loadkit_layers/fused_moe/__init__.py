"""A mixture of experts in two parameters: every expert's gate and up in one, its down in another.

``ranks`` which experts and which part of them a rank holds, ``names`` what checkpoints call an
expert's tensors, ``parameter`` one parameter of many experts, ``routing`` which experts a token
goes to, ``unquantized`` the method of plain numbers, ``layer`` the layer.
"""

from loadkit_layers.fused_moe.layer import FusedMoE
from loadkit_layers.fused_moe.parameter import ExpertParameter
from loadkit_layers.fused_moe.routing import Router
from loadkit_layers.fused_moe.unquantized import UnquantizedFusedMoEMethod, run_experts

__all__ = ["ExpertParameter", "FusedMoE", "Router", "UnquantizedFusedMoEMethod", "run_experts"]
