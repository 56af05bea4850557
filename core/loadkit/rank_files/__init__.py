"""Saving what each rank of a model holds, and placing it again: whatever the files are."""
