"""Benchmarks of speed and memory beside other libraries, a file for each, and their results.

Only measurements belong here; checks of correctness are in tests/.
"""
