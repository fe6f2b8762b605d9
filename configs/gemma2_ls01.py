"""Gemma 2 2B on the Tulu 3 mixture with label smoothing 0.1: the papers' main experiment."""

out_dir = 'out/gemma2_ls01'
model = 'google/gemma-2-2b'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
