"""Claim 3, questions in text and first tokens of facts: vocabulary by hidden size, soft-cap 30."""

include = 'vocabulary.py'
out_dir = 'assets/study/vocabulary_questions'
where = ('task=text4|facts', 'language=all', 'category=all', 'scaling=none',
         'hidden_size=64|256|1024', 'final_logit_softcapping=30.0', 'unused_rows=0|258048')
panel = ('task', 'hidden_size')
metrics = ('ece', 'gap', 'accuracy')
