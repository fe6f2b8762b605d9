"""Claim 5: a temperature fitted on 400 English questions; known and unknown entities."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/temperature'
where = ('kind=tuned|base', 'task=text4', 'language=en|l1|l2|l3', 'category=seen|unseen',
         'lr=0.0008|0.002', 'smoothing=0.0|0.1', 'scaling=none|temperature')
x = 'language'
by = ('kind', 'smoothing', 'scaling')
panel = ('category',)
metrics = ('ece', 'nll')
