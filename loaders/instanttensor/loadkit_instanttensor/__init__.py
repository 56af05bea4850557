"""InstantTensor: the reader and the load format of that name. Both need CUDA.

``stream`` is the library as the reader uses it, ``tensors`` where tensors lie in their files,
``availability`` whether it can be used here.
"""
