"""Claim 3, questions in text and first tokens of facts: vocabulary by hidden size, soft-cap 30."""

sources = ('out/study/vocabulary',)
out_dir = 'assets/study/vocabulary_questions'
where = ('task=text4|facts', 'language=all', 'category=all', 'scaling=none',
         'hidden_size=64|256|1024', 'final_logit_softcapping=30.0', 'unused_rows=0|258048')
x = 'vocab_size'
by = ('kind', 'smoothing', 'unused_rows')
panel = ('task', 'hidden_size')
metrics = ('ece', 'gap', 'accuracy')
