"""The six tasks: base, tuned, tuned with smoothing 0.1."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/summary'
where = ('kind=tuned|base', 'task=text4|text10|letters4|letters10|facts|clm', 'language=all',
         'category=all', 'scaling=none', 'lr=0.0008|0.002', 'smoothing=0.0|0.1')
x = 'smoothing'
reference = ('base',)
metrics = ('accuracy', 'ece')
