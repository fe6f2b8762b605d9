"""What the experiments that tune the base models of base.py share; they include this file."""

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
