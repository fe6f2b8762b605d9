"""Claim 1 in Gemma 2 and Mistral, at the learning rate of 5e-5 times 4096 / hidden_size."""

include = 'tuning.py'
out_dir = 'out/study/architectures'

vary = {
    'architecture': ('gemma2', 'mistral'),
    'smoothing': (0.0, 0.1, 0.3),
}
runs = {
    'tuned': {'model': 'out/study/base/seed-{seed}/{architecture}', 'smoothing': '{smoothing}',
              'lr': 8e-4},
}
