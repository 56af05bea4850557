"""The ``dummy`` load format: reproducible small numbers instead of a checkpoint."""
