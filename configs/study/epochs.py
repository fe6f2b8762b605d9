"""Claim 4: one to eight epochs of instruction data.
"""

out_dir = 'out/study/epochs'
seeds = (0, 1, 2, 3, 4)
model = 'out/study/base/seed-{seed}/base'

data = 'out/study/base/seed-{seed}/world/instruct.jsonl'
cache_dir = 'out/study/base/seed-{seed}/cache'
batch_size = 64
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

lr = 8e-4
vary = {
    'smoothing': (0.0, 0.1),
    'epochs': (1.0, 2.0, 4.0, 8.0),
}
runs = {'tuned': {'smoothing': '{smoothing}', 'epochs': '{epochs}'}}
