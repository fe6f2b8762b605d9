"""Claim 4: adapters and full fine-tuning."""

sources = ('out/study/base', 'out/study/smoothing', 'out/study/lora')
out_dir = 'assets/study/lora'
where = ('kind=tuned|base|lora', 'task=text4|letters4',
         'language=en', 'category=seen', 'scaling=none', 'lr=0.0008|0.0032|0.002',
         'smoothing=0.0|0.1')
x = 'lr'
by = ('lora', 'smoothing')
reference = ('base',)
metrics = ('ece', 'gap', 'accuracy')
