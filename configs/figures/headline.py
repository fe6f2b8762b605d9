"""Base, tuned and tuned with smoothing 0.1: all questions, all seeds."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/headline'
where = ('kind=tuned|base', 'task=text4|facts', 'language=all', 'category=all', 'scaling=none',
         'lr=0.0008|0.002', 'smoothing=0.0|0.1')
x = 'smoothing'
reference = ('base',)
metrics = ('accuracy', 'confidence', 'ece', 'rmsce', 'nll')
reliability = True
