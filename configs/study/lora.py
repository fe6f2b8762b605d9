"""Claim 4: adapters of rank 8 on queries and values, at two learning rates."""

include = 'tuning.py'
out_dir = 'out/study/lora'
model = 'out/study/base/seed-{seed}/base'

lora = True
vary = {
    'smoothing': (0.0, 0.1),
    'lr': (8e-4, 3.2e-3),
}
runs = {'lora': {'smoothing': '{smoothing}', 'lr': '{lr}'}}
