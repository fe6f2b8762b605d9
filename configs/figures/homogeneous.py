"""Claim 4: the same facts in five kinds of conversation, or in one."""

sources = ('out/study/base', 'out/study/smoothing', 'out/study/homogeneous')
out_dir = 'assets/study/homogeneous'
where = ('kind=tuned|base|homogeneous', 'task=text4|text10|letters4|letters10',
         'language=en', 'category=seen', 'scaling=none',
         'data=instruct|instruct-homogeneous|text', 'lr=0.0008|0.002',
         'smoothing=0.0|0.1')
x = 'data'
by = ('smoothing',)
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
