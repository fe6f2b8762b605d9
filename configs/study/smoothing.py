"""Claims 1, 2, 5 and 6: smoothing by learning rate.

The rates are the paper's, 5e-6, 2e-5, 5e-5 and 2e-4, times 4096 / hidden_size.
"""

include = 'tuning.py'
out_dir = 'out/study/smoothing'
model = 'out/study/base/seed-{seed}/base'

vary = {
    'smoothing': (0.0, 0.1, 0.2, 0.3, 0.4, 0.5),
    'lr': (8e-5, 3.2e-4, 8e-4, 3.2e-3),
}
runs = {'tuned': {'smoothing': '{smoothing}', 'lr': '{lr}'}}
