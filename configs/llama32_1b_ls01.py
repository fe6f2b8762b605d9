"""Llama 3.2 1B on the Tulu 3 mixture with label smoothing 0.1."""

out_dir = 'out/llama32_1b_ls01'
model = 'meta-llama/Llama-3.2-1B'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lr = 2e-5
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
