"""Llama 3.1 8B on the Tulu 3 mixture with label smoothing 0.1, on a card of 140 GB.

The other two configs of it fit 80 GB (all weights) and 24 GB (LoRA).
"""

out_dir = 'out/llama3_8b_ls01'
model = 'meta-llama/Llama-3.1-8B'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
checkpoint_activations = True

batch_size = 128
epochs = 2.0
lr = 5e-6
max_length = 4096
pack_len = 4096
val_size = 256

eval_tasks = ('mmlu', 'arc_easy', 'hellaswag')
