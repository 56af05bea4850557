"""The load format ``dcp``: folders that ``torch.distributed.checkpoint`` writes."""
