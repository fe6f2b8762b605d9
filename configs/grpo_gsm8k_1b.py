"""Dr. GRPO of Llama 3.2 1B Instruct on GSM8K, rewarded for the right number."""

out_dir = 'out/grpo_gsm8k_1b'
model = 'meta-llama/Llama-3.2-1B-Instruct'
template = 'llama3'
data = 'openai/gsm8k'

method = 'dr_grpo'
reward = 'exact:gsm8k'
instruction = 'Think step by step. Write the answer as a number after #### in the last line.'
group_size = 8
max_tokens = 400
max_length = 800
pack_len = 4096

batch_size = 32
epochs = 1.0
lr = 1e-6
schedule = 'linear'
warmup = 0.05
val_size = 200
val_every = 50
