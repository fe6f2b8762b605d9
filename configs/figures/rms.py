"""Claim 6: the RMS of MMLU's repository and eq. 5 on the same predictions."""

sources = ('out/study/base', 'out/study/smoothing')
out_dir = 'assets/study/rms'
where = ('kind=tuned|base', 'task=text4|text10|letters4|letters10',
         'language=en', 'category=seen', 'scaling=none', 'lr=0.0008|0.002')
x = 'smoothing'
reference = ('base',)
metrics = ('rmsce', 'rms_mmlu_repo', 'ece')
