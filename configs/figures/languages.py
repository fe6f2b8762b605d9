"""Claim 2: en was tuned on, l1, l2 and l3 were not."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/languages'
where = ('kind=tuned|base', 'task=text4', 'language=en|l1|l2|l3', 'category=seen',
         'scaling=none', 'lr=0.0008|0.002')
x = 'smoothing'
panel = ('language',)
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
