"""Claim 2, first tokens of facts: en was tuned on, l1, l2 and l3 were not."""

include = 'languages.py'
out_dir = 'assets/study/languages_facts'
where = ('kind=tuned|base', 'task=facts', 'language=en|l1|l2|l3', 'scaling=none',
         'lr=0.0008|0.002')
