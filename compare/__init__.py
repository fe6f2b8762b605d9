"""More than one run: comparisons of answers, of seeds, and scalings fitted on held-out parts.

evaluate.py --compare opens compare.py.
"""
