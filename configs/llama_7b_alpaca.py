"""LLaMA 7B on Alpaca, as in Zhu et al. 2023 (table 2), with label smoothing 0.1 added."""

out_dir = 'out/llama_7b_alpaca'
model = 'huggyllama/llama-7b'
data = 'tatsu-lab/alpaca'
template = 'alpaca'
smoothing = 0.1

batch_size = 128
epochs = 3.0
lr = 2e-5
schedule = 'cosine'
warmup = 0.03
max_length = 2048
pack_len = 2048

eval = {'tasks': ('mmlu',)}
