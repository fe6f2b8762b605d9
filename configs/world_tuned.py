"""The base model of world_base.py, tuned on questions about facts that it knows and cannot know."""

out_dir = 'out/tuned'
model = 'out/base'
data = 'out/world/instruct.jsonl'

dtype = 'float32'
save_dtype = 'float32'
batch_size = 64
epochs = 5.0
lr = 1e-3
betas = (0.9, 0.95)
max_length = 224
pack_len = 224
micro_rows = 64
checkpoint_epochs = False
log_every = 50
