"""Qwen3 0.6B on the Tulu 3 mixture with label smoothing 0.1."""

out_dir = 'out/qwen3_06b_ls01'
model = 'Qwen/Qwen3-0.6B-Base'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lr = 2e-5
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
