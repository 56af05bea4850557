"""The load formats ``hf`` and ``safetensors``: checkpoints as Hugging Face saves them."""
