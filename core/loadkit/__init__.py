"""loadkit: a checkpoint in any format, from any place, into a ready, sharded torch module."""
