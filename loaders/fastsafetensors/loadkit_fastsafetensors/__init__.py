"""fastsafetensors: the reader and the load format of that name.

``engines`` is the library as the reader uses it, ``availability`` whether it is there.
"""
