"""Files to tokens or to questions: readers, tokenizers, templates, benchmarks, prompts, packing.

Nothing here knows a model or what becomes of samples.
"""
