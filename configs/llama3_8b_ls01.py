"""Llama 3.1 8B on the Tulu 3 mixture with label smoothing 0.1, on a card with 140 GB.

llama3_8b_80gb_ls01.py trains all weights on 80 GB, llama3_8b_lora_ls01.py adapters on 24 GB.
"""

out_dir = 'out/llama3_8b_ls01'
model = 'meta-llama/Llama-3.1-8B'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
checkpoint_activations = True
lr = 5e-6
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
