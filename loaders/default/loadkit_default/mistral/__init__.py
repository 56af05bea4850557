"""Mistral's own checkpoints: ``consolidated*.safetensors`` and ``params.json``."""
