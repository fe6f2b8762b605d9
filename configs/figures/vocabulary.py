"""Claim 3, next tokens: rows of the vocabulary by hidden size, with and without soft-cap."""

sources = ('out/study/vocabulary',)
out_dir = 'assets/study/vocabulary'
where = ('task=clm', 'language=all', 'category=all', 'scaling=none', 'hidden_size=64|256|1024',
         'final_logit_softcapping=30.0|None', 'unused_rows=0|258048')
x = 'vocab_size'
by = ('kind', 'smoothing', 'unused_rows')
panel = ('hidden_size', 'final_logit_softcapping')
metrics = ('ece', 'gap', 'entropy_bits', 'reach_lowest_bits', 'accuracy')
