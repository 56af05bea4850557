"""Measuring loads: fresh processes, medians, and the floor of the machine."""
