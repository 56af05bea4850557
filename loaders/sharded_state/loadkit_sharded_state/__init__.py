"""The load formats ``sharded_state`` and ``runai_streamer_sharded``: files of single ranks."""
