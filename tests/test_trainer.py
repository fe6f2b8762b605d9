"""docs/trainer.md: the class on the page, against transformers on a CPU."""

import re

import pytest
import torch
from common import HERE, off, reference_model
from fused_ce import confidence_penalty, cross_entropy, focal, smoothing, z_loss

transformers = pytest.importorskip('transformers')
pytest.importorskip('accelerate')


@pytest.fixture(scope='module')
def trainer_class():
    page = (HERE / 'docs' / 'trainer.md').read_text()
    names = {}
    exec(re.search(r'```python\n(.*?)```', page, re.DOTALL)[1], names)
    return names['FusedLossTrainer']


def sequences(n=6, length=17):
    make = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 211, (n, length), generator=make)
    return [{'input_ids': tokens, 'attention_mask': torch.ones_like(tokens),
             'labels': tokens.masked_fill(torch.arange(length) < i, -100)}
            for i, tokens in enumerate(rows)]


def batch():
    return {key: torch.stack([row[key] for row in sequences(3)]) for key in sequences(1)[0]}


def trainer_of(trainer_class, model, tmp_path, **options):
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], save_strategy='no', logging_steps=1,
        per_device_train_batch_size=2, disable_tqdm=True, learning_rate=1e-3, max_grad_norm=0,
        optim='sgd', **options.pop('arguments', {}))
    return trainer_class(model, arguments, train_dataset=sequences(), **options)


@pytest.mark.parametrize('name', ['gemma2', 'cohere2', 'granite'])
def test_trainer_loss_is_the_models_own(trainer_class, tmp_path, name):
    """Loss and gradients of cross_entropy() are those that the model computes from its labels."""
    model = reference_model(name, tmp_path / 'model').train()
    trainer = trainer_of(trainer_class, model, tmp_path, loss=cross_entropy())
    expected = model(**batch()).loss
    expected.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    loss, outputs = trainer.compute_loss(model, batch(), return_outputs=True)
    loss.backward()
    assert off(loss, expected) < 1e-5 and outputs.logits.shape[1] == 1
    for key, p in model.named_parameters():
        assert off(p.grad, gradients[key]) < 1e-4, key


def test_a_model_with_other_logits_is_refused(trainer_class, tmp_path):
    """The head of Phi has a bias."""
    model = transformers.PhiForCausalLM(transformers.PhiConfig(
        vocab_size=211, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48))
    trainer = trainer_of(trainer_class, model, tmp_path, loss=cross_entropy())
    with pytest.raises(ValueError, match='have a bias or something else'):
        trainer.compute_loss(model, batch())


@pytest.mark.slow
def test_trainer_steps_are_the_trainers_own(trainer_class, tmp_path):
    """Accumulated steps of cross_entropy() move the weights as transformers' own Trainer does."""
    after = []
    for make, options in ((trainer_class, {'loss': cross_entropy()}), (transformers.Trainer, {})):
        model = reference_model('gemma2', tmp_path / 'model')
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        trainer_of(make, model, tmp_path, **options, arguments={
            'max_steps': 2, 'gradient_accumulation_steps': 3, 'seed': 1}).train()
        after.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert after[0].norm() > 0 and off(after[0], after[1]) < 1e-3


@pytest.mark.slow
def test_trainer_lowers_a_loss(trainer_class, tmp_path):
    model = reference_model('gemma2', tmp_path / 'model')
    trainer = trainer_of(trainer_class, model, tmp_path, arguments={
        'num_train_epochs': 8, 'prediction_loss_only': True},
        loss=smoothing(0.1) + focal(2) + z_loss(1e-4) + confidence_penalty(0.1))
    before = trainer.evaluate(sequences())['eval_loss']
    trainer.train()
    assert trainer.evaluate(sequences())['eval_loss'] < before
