"""The defaults of open-instruct (commit e363290) with the label-smoothing paper's smoothing.

The paper names open-instruct as its training code. What it leaves open, and the choice made here:

- BOS: the template has none and open-instruct's `--add_bos` is off by default. Gemma breaks down
  without BOS, so the paper's Gemma runs may have had one.
- Loss: open-instruct averages over the tokens of each micro-batch of one sequence, then over the
  128 sequences of a step, which is 'sequence'. Its Tulu 3 recipe uses `sum`, which with clipping
  and Adam is close to 'token'.
- Dropout: the paper's "dropout 0.1" is open-instruct's dropout on the input of LoRA adapters
  (`lora_dropout`). Full fine-tuning, as here, has no dropout.
- Clipping: off in open-instruct's own flags, but DeepSpeed's "auto" setting makes it 1.0.
- Vocabulary: open-instruct adds a padding token and pads the embedding to a multiple of 8, so that
  smoothing also reaches those rows (8 of 128,264 for Llama 3). Here the vocabulary is unchanged.
- Weight decay is 0, the warm-up takes 3 % of the steps, and the learning rate then falls linearly
  to 0, as in open-instruct's scripts.
"""

out_dir = 'out/paper_openinstruct'
model = 'meta-llama/Llama-3.1-8B'
data = 'allenai/tulu-3-sft-mixture'
template = 'tulu'
add_bos = False
smoothing = 0.1
loss_reduction = 'sequence'

batch_size = 128
epochs = 2.0
lr = 2e-5
schedule = 'linear'
warmup = 0.03
betas = (0.9, 0.999)
eps = 1e-8
weight_decay = 0.0
grad_clip = 1.0
max_length = 4096
pack_len = 4096
seed = 42

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
