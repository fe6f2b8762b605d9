"""Claim 4: as in size.py, but questions of all languages and entities, facts and next tokens."""

include = 'size.py'
out_dir = 'assets/study/size_all'
where = ('kind=tuned|base|tiny|medium|large', 'task=text4|facts|clm',
         'language=all', 'category=all', 'scaling=none',
         'lr=0.0008|0.002|0.004|0.001|0.0005|0.0016|0.0004|0.0002', 'smoothing=0.0|0.1')
