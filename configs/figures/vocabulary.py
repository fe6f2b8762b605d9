"""Claim 3: vocabulary by hidden size; facts by the first token, with what entropy is in reach."""

sources = ('out/study/vocabulary',)
out_dir = 'assets/study/vocabulary'
where = ('task=text4|facts', 'language=all', 'category=all', 'scaling=none',
         'final_logit_softcapping=30.0')
x = 'vocab_size'
by = ('kind', 'smoothing', 'reach_pieces')
panel = ('task', 'hidden_size')
metrics = ('ece', 'gap', 'entropy_bits', 'reach_lowest_bits', 'reach_highest_bits')
