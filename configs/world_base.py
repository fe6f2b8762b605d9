"""A base model of 0.6 million parameters on the text of a generated world, for a CPU.

The settings are those of demo.py. docs/investigation.md makes the world.
"""

out_dir = 'out/base'
model = 'out/world/model'       # a tokenizer and a config.json, no weights
from_scratch = True
data = 'out/world/text.jsonl'
data_kind = 'text'

dtype = 'float32'
save_dtype = 'float32'
batch_size = 24
epochs = 1.0
lr = 4e-3
schedule = 'cosine'
final_lr = 0.05
betas = (0.9, 0.95)
weight_decay = 0.1
max_length = 224
pack_len = 224
micro_rows = 64
checkpoint_epochs = False
log_every = 50
