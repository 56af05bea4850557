"""Parameters from the memory of a replica: who it is, what it holds, and how it is read.

``identity`` says which replicas hold the same, ``finding`` finds one, ``replica_file`` is its
memory as a plan sees it, ``transfer`` and ``reader`` move it by NIXL, ``serving`` is the other
side.
"""
