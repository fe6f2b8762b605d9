"""Claim 4: models of 1, 6, 34 and 210 million weights; from_scratch is the base model."""

sources = ('out/study/base', 'out/study/smoothing', 'out/study/size')
out_dir = 'assets/study/size'
where = ('kind=tuned|base|tiny|medium|large', 'task=text4|letters4',
         'language=en', 'category=seen', 'scaling=none',
         'lr=0.0008|0.002|0.004|0.001|0.0005|0.0016|0.0004|0.0002', 'smoothing=0.0|0.1')
x = 'hidden_size'
by = ('from_scratch', 'smoothing')
metrics = ('ece', 'gap', 'accuracy')
