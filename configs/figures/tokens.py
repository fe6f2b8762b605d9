"""Claim 1: the next token of any text, and the first token of a fact."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/tokens'
where = ('kind=tuned|base', 'task=facts|clm', 'language=all', 'category=all', 'scaling=none')
x = 'smoothing'
by = ('lr',)
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
