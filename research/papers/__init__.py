"""One script per paper: its models, its grid of runs, and its tables in the paper's own layout.

Only what one paper does differently belongs here; nothing outside this folder imports it.
"""
