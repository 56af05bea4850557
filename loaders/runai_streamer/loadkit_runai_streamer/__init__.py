"""The Run:ai model streamer: the reader ``runai`` and the load format ``runai_streamer``.

``streamer`` is the library as the reader uses it, ``availability`` whether it is there.
"""
