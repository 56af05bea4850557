"""What ``torch.save`` writes, read without running anything: pickles, zip directories, tensors.

A pickle is walked by a machine that imports nothing (``stack``, ``machine``); the records of a zip
archive are found by its directory (``zip_directory``); what the pickle says of tensors is held
against them (``tensors``). Load formats whose files hold such archives build on it.
"""
