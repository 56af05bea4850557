"""Writing checkpoints without a model in memory: what to write, where, and how far it is."""
