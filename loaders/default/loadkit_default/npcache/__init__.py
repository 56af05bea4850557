"""``npcache``: a checkpoint's tensors once more, as numpy files in a cache folder of this machine.

The cache is made by the first plan or load and used by the later ones. It never lies in the
checkpoint's folder, and one that is found there is never used.
"""
