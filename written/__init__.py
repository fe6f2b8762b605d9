"""Answers that a model writes, for evaluate.py: generate, grade and judge them.

This joins data/ (questions, rules) and results/ (samples), which do not know each other. Metrics
and tables of these answers belong in results/, extraction and match rules in data/.
"""
