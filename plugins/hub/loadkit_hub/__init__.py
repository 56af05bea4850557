"""Repositories of model hubs as sources: ``hf://``, plain repository names, ``modelscope://``."""
