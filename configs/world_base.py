"""A base model of 0.6 million parameters on the text of a generated world, for a CPU.

The settings are those of demo.py, for a world with several kinds of questions and facts:

    python -c "from research.study.world import StudySpec, make_world
    make_world('out/world', 0, StudySpec(forms=('text4',), validation=440, probes=1000))"
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
