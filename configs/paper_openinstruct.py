"""The defaults of open-instruct at commit e363290, the training setup the label-smoothing paper
names, with the paper's smoothing. What the paper leaves open, and what stands here:

- BOS: the template has none and `--add_bos` is off by default. Gemma without BOS breaks down, so
  its runs may have had one.
- Loss: the mean over the tokens of a micro-batch of one sequence, averaged over the 128 of a step:
  'sequence'. Its Tulu 3 recipe says `sum`, which with clipping and Adam is close to 'token'.
- Dropout: the paper's "dropout 0.1" is open-instruct's `lora_dropout`; full fine-tuning has none.
- Clipping: off in its own flags, but DeepSpeed's "auto" fills in 1.0.
- Vocabulary: it adds a padding token and pads the embedding to a multiple of 8; smoothing then also
  reaches those rows (8 of 128,264 for Llama 3). Here the vocabulary stays as it is.
- Weight decay is 0, warm-up 3 % of the steps, the schedule linear to 0, as in its scripts.
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

eval_tasks = ('mmlu', 'arc_easy', 'hellaswag')
