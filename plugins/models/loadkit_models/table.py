"""Every architecture of this distribution: which table it belongs to, and where its class is.

The tables are those that model lists use: text generation, embedding, multimodal, speculative
decoding. The entry points of the distribution say the same; a test keeps the two equal.
"""

from __future__ import annotations

__all__ = ["MODELS"]

# architecture (as config.json names it) -> (table, "module:Class")
MODELS: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("text_generation", "loadkit_models.llama:LlamaForCausalLM"),
    "MistralForCausalLM": ("text_generation", "loadkit_models.llama:MistralForCausalLM"),
    "Qwen2ForCausalLM": ("text_generation", "loadkit_models.qwen2:Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("text_generation", "loadkit_models.qwen3:Qwen3ForCausalLM"),
    "Qwen3MoeForCausalLM": ("text_generation", "loadkit_models.qwen3_moe:Qwen3MoeForCausalLM"),
    "MixtralForCausalLM": ("text_generation", "loadkit_models.mixtral:MixtralForCausalLM"),
    "Gemma3ForCausalLM": ("text_generation", "loadkit_models.gemma3:Gemma3ForCausalLM"),
    "BertModel": ("embedding", "loadkit_models.bert:BertModel"),
}
