"""Benchmarks of speed and memory, compared with other libraries, a file each, and their results.

Only measurements belong here; checks of correctness are in tests/.
"""
