"""Claim 4: one to eight epochs of instruction data."""

include = 'tuning.py'
out_dir = 'out/study/epochs'
model = 'out/study/base/seed-{seed}/base'

lr = 8e-4
vary = {
    'smoothing': (0.0, 0.1),
    'epochs': (1.0, 2.0, 4.0, 8.0),
}
runs = {'tuned': {'smoothing': '{smoothing}', 'epochs': '{epochs}'}}
