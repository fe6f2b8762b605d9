"""The study's world and its base models: Llama of four sizes, Gemma 2 and Mistral, from scratch.

The peak learning rate is 0.5 / hidden_size. All experiments except that of vocabulary.py tune
these models.

    python research/study/base.py --seeds=0 --only=base
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from research.study import common
from research.study.world import StudySpec, make_world
from train import TrainConfig

WORLD = StudySpec(
    entities=1_000_000, unseen=10_000, zipf=1.0, first_names=1_000, family_names=1_200,
    documents=400_000, entities_each=6, list_share=0.2, exam_share=0.25, paraphrases=True,
    language_shares=(0.4, 0.3, 0.2, 0.1), vocab_sizes=(4_096,), tokenizer_documents=20_000,
    instructions=4_000, questions=1_000, unseen_questions=400, validation=400,
    forms=common.FORMS, probes=1_000)


def llama(hidden, mlp, layers, heads, **more):
    return {'hidden_size': hidden, 'intermediate_size': mlp, 'num_hidden_layers': layers,
            'num_attention_heads': heads, 'num_key_value_heads': heads} | more


# name: (learning rate, shape)
MODELS = {
    'base': (2e-3, llama(256, 704, 6, 4)),
    'gemma2': (2e-3, llama(256, 704, 6, 4, model_type='gemma2', num_key_value_heads=2, head_dim=64,
                           query_pre_attn_scalar=64, sliding_window=256,
                           attn_logit_softcapping=50.0, final_logit_softcapping=30.0)),
    'mistral': (2e-3, llama(256, 704, 6, 4, model_type='mistral', num_key_value_heads=2,
                            sliding_window=256)),
    'tiny': (4e-3, llama(128, 352, 3, 2)),
    'medium': (1e-3, llama(512, 1408, 10, 8)),
    'large': (5e-4, llama(1024, 2816, 16, 16)),
}


def runs(seed, root=common.ROOT):
    folder = common.seed_folder('base', seed, root)
    for name, (lr, shape) in MODELS.items():
        yield TrainConfig(
            model=f'{folder}/world/model', from_scratch=True, shape=shape, add_bos=True,
            data=f'{folder}/world/text.jsonl', data_kind='text', cache_dir=f'{folder}/cache',
            epochs=1.0, batch_size=384, pack_len=1024, max_length=512, micro_rows=36,
            lr=lr, schedule='cosine', final_lr=0.05, weight_decay=0.1, betas=(0.9, 0.95),
            checkpoint_epochs=False, save_every=None, log_every=100, pictures=False,
            eval=common.evaluation(f'{folder}/world', common.FORMS), eval_before=False,
            out_dir=f'{folder}/{name}', seed=seed)


def world(seed, root=common.ROOT):
    make_world(f'{common.seed_folder("base", seed, root)}/world', seed, WORLD)


if __name__ == '__main__':
    common.main(runs, prepare=world)
