"""DPO of Llama 3.1 Tulu 3 8B as in Tulu 3 (2411.15124): margins per token, beta 5."""

out_dir = 'out/dpo_tulu3_8b'
model = 'allenai/Llama-3.1-Tulu-3-8B-SFT'
data = 'allenai/llama-3.1-tulu-3-8b-preference-mixture'

method = 'dpo'
per_token = True
beta = 5.0

batch_size = 128
epochs = 1.0
lr = 5e-7
warmup = 0.1
schedule = 'linear'
max_length = 2048
pack_len = 4096
checkpoint_activations = True

eval = {'tasks': ('mmlu', 'arc_easy', 'hellaswag')}
