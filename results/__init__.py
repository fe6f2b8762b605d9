"""From samples to results: the samples file, tables, pictures, comparisons of runs.

Nothing here needs a model or reads training data: everything is computed from samples.jsonl.
"""
