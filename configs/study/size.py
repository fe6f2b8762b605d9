"""Claim 4: base models of 1, 34 and 210 million weights (the one of the other claims has 6).

The learning rate is 0.2 / hidden_size.
"""

out_dir = 'out/study/size'
seeds = (0, 1, 2, 3, 4)

data = 'out/study/base/seed-{seed}/world/instruct.jsonl'
cache_dir = 'out/study/base/seed-{seed}/cache'
batch_size = 64
epochs = 3.0
pack_len = 1024
max_length = 512
micro_rows = 4
checkpoint_epochs = False
save_every = None
log_every = 50

eval_tasks = ('out/study/base/seed-{seed}/world/text4', 'out/study/base/seed-{seed}/world/text10',
              'out/study/base/seed-{seed}/world/letters4',
              'out/study/base/seed-{seed}/world/letters10',
              'clm:out/study/base/seed-{seed}/world/clm.jsonl',
              'facts:out/study/base/seed-{seed}/world/facts.jsonl')
eval_before = False
eval_scoring = 'text'
eval_shots = 0
eval_temperature = 'fit'
eval_n_bootstrap = 0
pictures = False

vary = {'smoothing': (0.0, 0.1)}
runs = {
    'tuned-tiny': {'model': 'out/study/base/seed-{seed}/tiny', 'smoothing': '{smoothing}',
                   'lr': 1.6e-3},
    'tuned-medium': {'model': 'out/study/base/seed-{seed}/medium', 'smoothing': '{smoothing}',
                     'lr': 4e-4},
    'tuned-large': {'model': 'out/study/base/seed-{seed}/large', 'smoothing': '{smoothing}',
                    'lr': 2e-4},
}
