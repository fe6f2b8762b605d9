"""Llama 2 7B on the Tulu 3 mixture with label smoothing 0.1."""

out_dir = 'out/llama2_7b_ls01'
model = 'meta-llama/Llama-2-7b-hf'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
