"""Files to tokens or to questions: readers, tokenizers, templates, benchmarks, prompts, packing.

Nothing here depends on a model or on results.
"""
