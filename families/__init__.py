"""Architectures that do not fit into FAMILIES, the table of families in model.py.

A file holds the blocks of one architecture; what several share belongs in model.py.
"""
