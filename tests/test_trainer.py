"""docs/trainer.md: the class on the page, against transformers on a CPU."""

import re

import pytest
import torch
from common import HERE, by_transformers, off, reference_model
from fused_ce import cross_entropy, z_loss

transformers = pytest.importorskip('transformers')
pytest.importorskip('accelerate')


def names_of_page(*blocks):
    """Return what these blocks of Python on the page define."""
    page, names = (HERE / 'docs' / 'trainer.md').read_text(), {}
    for block in blocks:
        exec(re.findall(r'```python\n(.*?)```', page, re.DOTALL)[block], names)
    return names


FusedLossTrainer = names_of_page(0)['FusedLossTrainer']


def sequences(n=6, length=17):
    make = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 211, (n, length), generator=make)
    return [{'input_ids': tokens, 'attention_mask': torch.ones_like(tokens),
             'labels': tokens.masked_fill(torch.arange(length) < i, -100)}
            for i, tokens in enumerate(rows)]


def batch():
    return {key: torch.stack([row[key] for row in sequences(3)]) for key in sequences(1)[0]}


OPTIONS = {'use_cpu': True, 'bf16': False, 'report_to': [], 'save_strategy': 'no',
           'logging_steps': 1, 'disable_tqdm': True}


def trainer_of(trainer_class, model, tmp_path, **options):
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, learning_rate=1e-3, max_grad_norm=0,
        optim='sgd', **OPTIONS, **options.pop('arguments', {}))
    return trainer_class(model, arguments, train_dataset=sequences(), **options)


def first_log(trainer_class, base, arguments, rows, **options):
    """Train a small random model with a trainer of trl, and return the log of its first step."""
    datasets = pytest.importorskip('datasets')
    tokenizer = transformers.LlamaTokenizer.from_pretrained(base, pad_token='</s>')
    trainer = trainer_class(by_transformers(base), args=arguments, processing_class=tokenizer,
                            train_dataset=datasets.Dataset.from_list(rows), **options)
    trainer.train()
    return trainer.state.log_history[0]


@pytest.mark.parametrize('name', ['gemma2', 'cohere2', 'granite'])
def test_trainer_loss_is_the_models_own(tmp_path, name):
    model = reference_model(name, tmp_path / 'model').train()
    trainer = trainer_of(FusedLossTrainer, model, tmp_path, loss=cross_entropy())
    expected = model(**batch()).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    loss, outputs = trainer.compute_loss(model, batch(), return_outputs=True)
    loss.backward()
    assert off(loss, expected) < 1e-5 and outputs.logits.shape[1] == 1
    for key, p in model.named_parameters():
        assert off(p.grad, gradients[key]) < 1e-4, key


def test_a_model_with_other_logits_is_refused(tmp_path):
    """The head of Phi has a bias."""
    model = transformers.PhiForCausalLM(transformers.PhiConfig(
        vocab_size=211, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    trainer = trainer_of(FusedLossTrainer, model, tmp_path, loss=cross_entropy())
    with pytest.raises(ValueError, match='have a bias or something else'):
        trainer.compute_loss(model, batch())


@pytest.mark.slow
def test_trainer_steps_are_the_trainers_own(tmp_path):
    after = []
    for make, loss in ((FusedLossTrainer, {'loss': cross_entropy()}), (transformers.Trainer, {})):
        model = reference_model('gemma2', tmp_path / 'model')
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        trainer_of(make, model, tmp_path, **loss, arguments={
            'max_steps': 2, 'gradient_accumulation_steps': 3, 'seed': 1}).train()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert after[0].norm() > 0 and off(after[0], after[1]) < 1e-3


@pytest.mark.slow
def test_the_sft_trainer_of_trl_has_our_loss(base, tmp_path):
    trl = pytest.importorskip('trl')
    arguments = trl.SFTConfig(str(tmp_path), max_steps=2, per_device_train_batch_size=4, **OPTIONS)
    rows = [{'text': f'the quick fox {i} jumps'} for i in range(8)]
    ours, more = (first_log(names_of_page(0, 2)['FusedLossSFTTrainer'], base, arguments, rows,
                            loss=loss)['loss']
                  for loss in (cross_entropy(), cross_entropy() + z_loss(10.0)))
    assert more > ours + 1


@pytest.mark.slow
def test_rewards_train_a_model_in_trl(base, tmp_path):
    reward = names_of_page(3)['reward']
    right = '<answer>\\boxed{4}</answer><confidence>0.9</confidence>'
    columns = {'question': ['2 + 2?'] * 3, 'answer': ['so 4\n#### 4'] * 3}
    texts = [right, right.replace('{4}', '{5}'), 'four']
    expected = pytest.approx([1 + 0.5 * (1 - 0.01), 0.5 + 0.5 * (1 - 0.81), 0])
    assert reward(['?'] * 3, texts, **columns) == expected
    messages = [[{'role': 'assistant', 'content': text}] for text in texts]
    assert reward([[]] * 3, messages, **columns, trainer_state=None) == expected

    trl = pytest.importorskip('trl')
    arguments = trl.GRPOConfig(str(tmp_path), max_steps=1, per_device_train_batch_size=4,
                               num_generations=2, max_completion_length=4, **OPTIONS)
    rows = [{'prompt': f'the quick fox {i}', 'question': f'{i}?', 'answer': f'#### {i}'}
            for i in range(4)]
    log = first_log(trl.GRPOTrainer, base, arguments, rows, reward_funcs=reward)
    assert log['rewards/reward/mean'] == 0
