"""Claim 1 in Gemma 2 and Mistral, at the learning rate of 5e-5 times 4096 / hidden_size.
"""

out_dir = 'out/study/architectures'
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

vary = {
    'architecture': ('gemma2', 'mistral'),
    'smoothing': (0.0, 0.1, 0.3),
}
runs = {
    'tuned': {'model': 'out/study/base/seed-{seed}/{architecture}', 'smoothing': '{smoothing}',
              'lr': 8e-4},
}
