"""Answers that a model writes, to many prompts at once.

How a token is drawn, the cache of keys and values, the slots of the sequences decoded at once, and
the loop, answers.py; the forward pass is model.py's.
"""
