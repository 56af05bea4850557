"""The load format ``gguf``: config, tensor names and weights from GGUF files alone."""
