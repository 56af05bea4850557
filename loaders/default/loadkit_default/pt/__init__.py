"""``.bin``, ``.pt`` and ``.pth``: what ``torch.save`` wrote, read without unpickling anything.

A file goes through three steps: its container (``zip_directory`` or ``legacy``) says where each
storage lies, ``machine`` walks the pickle and imports nothing, and ``state_dict`` holds what the
pickle says of every tensor against the container.
"""
