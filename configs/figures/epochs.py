"""Claim 4: epochs of instruction data."""

sources = ('out/study/base', 'out/study/smoothing', 'out/study/epochs')
out_dir = 'assets/study/epochs'
where = ('kind=tuned|base', 'task=text4|letters4',
         'language=en', 'category=seen', 'scaling=none', 'lr=0.0008|0.002', 'smoothing=0.0|0.1')
x = 'epochs'
by = ('smoothing',)
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
