"""Llama 3.1 8B with LoRA on a 24 GB card (peak below 20 GiB)."""

out_dir = 'out/llama3_8b_lora_ls01'
model = 'meta-llama/Llama-3.1-8B'
data = 'allenai/tulu-3-sft-mixture'
smoothing = 0.1
lora = True
lora_targets = ('q_proj', 'v_proj')
checkpoint_activations = True
lr = 1e-4
val_size = 256

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
