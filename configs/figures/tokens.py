"""Claim 1: the next token of any text, and the first token of a fact."""

include = 'smoothing.py'
out_dir = 'assets/study/tokens'
where = ('kind=tuned|base', 'task=facts|clm', 'language=all', 'category=all', 'scaling=none')
