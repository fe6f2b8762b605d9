"""Claim 1: smoothing by learning rate, English questions about entities of the text."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/smoothing'
where = ('kind=tuned|base', 'task=text4|text10|letters4|letters10',
         'language=en', 'category=seen', 'scaling=none')
x = 'smoothing'
by = ('lr',)
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
