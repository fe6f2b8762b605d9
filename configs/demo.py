"""From nothing to a calibration report in minutes on a CPU: a generated world, a tiny base model
trained on it, tuned without and with label smoothing, and the three compared.
"""

out_dir = 'out/demo'
demo_world = '{out_dir}/world'
cache_dir = '{out_dir}/cache'

dtype = 'float32'
save_dtype = 'float32'
pack_len = 224
max_length = 224
micro_rows = 64
checkpoint_epochs = False
log_every = 50
betas = (0.9, 0.95)

eval_tasks = ('{out_dir}/world/questions.jsonl',)
eval_before = False
eval_scoring = 'text'
eval_shots = 0
eval_pack_len = 224
eval_batch_rows = 32

runs = {
    'base': {
        'model': '{out_dir}/world/model', 'from_scratch': True,
        'data': '{out_dir}/world/text.jsonl', 'data_kind': 'text',
        'epochs': 1.0, 'batch_size': 24, 'lr': 4e-3, 'schedule': 'cosine', 'final_lr': 0.05,
        'weight_decay': 0.1,
    },
    'tuned': {
        'model': '{out_dir}/base', 'data': '{out_dir}/world/instruct.jsonl',
        'epochs': 5.0, 'batch_size': 64, 'lr': 1e-3,
    },
    'tuned_ls01': {
        'model': '{out_dir}/base', 'data': '{out_dir}/world/instruct.jsonl',
        'epochs': 5.0, 'batch_size': 64, 'lr': 1e-3, 'smoothing': 0.1,
    },
}
