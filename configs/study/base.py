"""The study's world and its base models: Llama of three sizes, Gemma 2 and Mistral, from nothing.

The peak learning rate is 0.5 / hidden_size. Everything else in configs/study/ but vocabulary.py
starts from what this makes.
"""

out_dir = 'out/study/base'
seeds = (0, 1, 2, 3, 4)
demo_world = '{out_dir}/world'
cache_dir = '{out_dir}/cache'
world = {
    'entities': 1_000_000, 'unseen': 10_000, 'zipf': 1.0,
    'first_names': 1_000, 'family_names': 1_200,
    'documents': 400_000, 'entities_each': 6, 'list_share': 0.2, 'exam_share': 0.25,
    'paraphrases': True, 'language_shares': (0.4, 0.3, 0.2, 0.1),
    'vocab_sizes': (4_096,), 'tokenizer_documents': 20_000,
    'instructions': 4_000, 'questions': 1_000, 'unseen_questions': 400, 'validation': 400,
    'forms': ('text4', 'text10', 'letters4', 'letters10'), 'probes': 1_000,
}

model = '{out_dir}/world/model'
from_scratch = True
data = '{out_dir}/world/text.jsonl'
data_kind = 'text'
epochs = 1.0
batch_size = 384
pack_len = 1024
max_length = 512
micro_rows = 36
schedule = 'cosine'
final_lr = 0.05
weight_decay = 0.1
betas = (0.9, 0.95)
checkpoint_epochs = False
save_every = None
log_every = 100

eval_tasks = ('{out_dir}/world/text4', '{out_dir}/world/text10', '{out_dir}/world/letters4',
              '{out_dir}/world/letters10', 'clm:{out_dir}/world/clm.jsonl',
              'facts:{out_dir}/world/facts.jsonl')
eval_before = False
eval_scoring = 'text'
eval_shots = 0
eval_temperature = 'fit'
eval_n_bootstrap = 0
pictures = False

runs = {
    'base': {
        'lr': 2e-3,
        'shape': {'hidden_size': 256, 'intermediate_size': 704, 'num_hidden_layers': 6,
                  'num_attention_heads': 4, 'num_key_value_heads': 4},
    },
    'gemma2': {
        'lr': 2e-3,
        'shape': {'model_type': 'gemma2', 'hidden_size': 256, 'intermediate_size': 704,
                  'num_hidden_layers': 6, 'num_attention_heads': 4, 'num_key_value_heads': 2,
                  'head_dim': 64, 'query_pre_attn_scalar': 64, 'sliding_window': 256,
                  'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
    },
    'mistral': {
        'lr': 2e-3,
        'shape': {'model_type': 'mistral', 'hidden_size': 256, 'intermediate_size': 704,
                  'num_hidden_layers': 6, 'num_attention_heads': 4, 'num_key_value_heads': 2,
                  'sliding_window': 256},
    },
    'tiny': {
        'lr': 4e-3,
        'shape': {'hidden_size': 128, 'intermediate_size': 352, 'num_hidden_layers': 3,
                  'num_attention_heads': 2, 'num_key_value_heads': 2},
    },
    'medium': {
        'lr': 1e-3,
        'shape': {'hidden_size': 512, 'intermediate_size': 1408, 'num_hidden_layers': 10,
                  'num_attention_heads': 8, 'num_key_value_heads': 8},
    },
    'large': {
        'lr': 5e-4,
        'shape': {'hidden_size': 1024, 'intermediate_size': 2816, 'num_hidden_layers': 16,
                  'num_attention_heads': 16, 'num_key_value_heads': 16},
    },
}
