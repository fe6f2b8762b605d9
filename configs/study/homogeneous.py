"""Claim 4: the same facts, all asked and answered in one way."""

include = 'tuning.py'
out_dir = 'out/study/homogeneous'
model = 'out/study/base/seed-{seed}/base'

lr = 8e-4
vary = {'smoothing': (0.0, 0.1)}
runs = {
    'homogeneous': {'data': 'out/study/base/seed-{seed}/world/instruct-homogeneous.jsonl',
                    'smoothing': '{smoothing}'},
}
