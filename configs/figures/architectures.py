"""Claim 1 in three architectures, all questions."""

sources = ('out/study/base', 'out/study/smoothing', 'out/study/architectures')
out_dir = 'assets/study/architectures'
where = ('kind=tuned|base|gemma2|mistral', 'task=text4|facts', 'model_type=llama|gemma2|mistral',
         'language=all', 'category=all', 'scaling=none', 'lr=0.0008|0.002',
         'smoothing=0.0|0.1|0.3', 'hidden_size=256')
x = 'smoothing'
panel = ('task', 'model_type')
reference = ('base', 'gemma2', 'mistral')
metrics = ('ece', 'accuracy')
