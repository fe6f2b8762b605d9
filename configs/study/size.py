"""Claim 4: base models of 1, 34 and 210 million weights (the one of the other claims has 6).

The learning rate is 0.2 / hidden_size.
"""

include = 'tuning.py'
out_dir = 'out/study/size'

vary = {'smoothing': (0.0, 0.1)}
runs = {
    'tuned-tiny': {'model': 'out/study/base/seed-{seed}/tiny', 'smoothing': '{smoothing}',
                   'lr': 1.6e-3},
    'tuned-medium': {'model': 'out/study/base/seed-{seed}/medium', 'smoothing': '{smoothing}',
                     'lr': 4e-4},
    'tuned-large': {'model': 'out/study/base/seed-{seed}/large', 'smoothing': '{smoothing}',
                    'lr': 2e-4},
}
