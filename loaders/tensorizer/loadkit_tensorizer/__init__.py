"""Load format ``tensorizer``: files that the tensorizer library writes, ours or anybody's."""
