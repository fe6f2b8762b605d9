"""Mistral 7B v0.3 on the Tulu 3 mixture with label smoothing 0.1."""

out_dir = 'out/mistral_7b_ls01'
model = 'mistralai/Mistral-7B-v0.3'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
